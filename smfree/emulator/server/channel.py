"""One connection: whole messages, blocks of bytes without detours, and file descriptors.

A message is a header (magic, bytes of control, bytes of blocks), the control bytes of
:mod:`smfree.emulator.server.wire`, then the blocks. Descriptors ride on its first byte. Sockets are abstract
Unix sockets: a name without a file. The kernel tells who is at the other end; only the same user is let in.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from smfree.emulator.server.wire import WireError, decode, encode

PROTOCOL = 1
"""What client and server agree on in their greeting."""
_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"SMF4"
CONTROL_LIMIT = 64 << 20
BULK_LIMIT = 1 << 37
"""More than any emulated GPU holds."""
_MAX_FDS = 4
_FD_BYTES = array.array("i").itemsize


class ChannelClosed(ConnectionError):
    """The other end is gone, between two messages or within one."""


class Channel:
    """Sends and receives messages on a connected socket; one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(self, value: Any, fds: Sequence[int] = ()) -> None:
        """Send a value. Raises TypeError when it does not travel (nothing is sent), ChannelClosed."""
        message = encode(value)
        head = _HEADER.pack(_MAGIC, len(message.control), message.bulk_bytes) + message.control
        parts = [memoryview(head), *(block for block in message.blocks if block.nbytes)]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            while parts:
                sent = self.socket.sendmsg(parts[:64], ancillary)
                ancillary = []
                while parts and sent >= parts[0].nbytes:
                    sent -= parts.pop(0).nbytes
                if sent:
                    parts[0] = parts[0][sent:]
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, into: memoryview | None = None) -> tuple[Any, list[int]]:
        """The next value and the descriptors that came with it, which are the caller's to close.

        ``into``: where the blocks go when they are exactly as long. Raises ChannelClosed and WireError.
        """
        fds: list[int] = []
        try:
            head = self._header(fds)
            magic, control_bytes, bulk_bytes = _HEADER.unpack(head)
            if magic != _MAGIC or control_bytes > CONTROL_LIMIT or bulk_bytes > BULK_LIMIT:
                raise WireError(f"the message has a header nobody sends: {head!r}")
            control = bytearray(control_bytes)
            self._fill(memoryview(control))
            if into is None or into.nbytes != bulk_bytes:
                into = _room(bulk_bytes)
            self._fill(into)
            return decode(control, into), fds
        except BaseException as error:
            close_all(fds)
            if isinstance(error, OSError) and not isinstance(error, ChannelClosed):
                raise ChannelClosed(str(error)) from None
            raise

    def _header(self, fds: list[int]) -> bytes:
        head = b""
        while len(head) < _HEADER.size:
            data, ancillary, _, _ = self.socket.recvmsg(
                _HEADER.size - len(head), socket.CMSG_SPACE(_MAX_FDS * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    found = array.array("i")
                    found.frombytes(payload[: len(payload) // _FD_BYTES * _FD_BYTES])
                    fds.extend(found)
            if not data:
                raise ChannelClosed("the other end closed the connection")
            head += data
        return head

    def _fill(self, view: memoryview) -> None:
        at = 0
        while at < view.nbytes:
            count = self.socket.recv_into(view[at:])
            if count == 0:
                raise ChannelClosed("the other end closed the connection within a message")
            at += count

    def __del__(self) -> None:
        self.socket.close()  # no shutdown: after a fork the parent goes on using it

    def close(self) -> None:
        """Close; whoever waits in :meth:`receive` here or there finds out."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _room(nbytes: int) -> memoryview:
    try:
        return np.empty(nbytes, np.uint8).data
    except MemoryError:
        raise WireError(f"a message of {nbytes} bytes does not fit in memory") from None


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that came with a message."""
    for fd in fds:
        os.close(fd)


def connect(name: str, timeout_s: float = 10.0) -> Channel:
    """A connection to the abstract socket ``name``. Raises OSError, PermissionError for another user's."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect("\0" + name)
        check_peer(connection)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return Channel(connection)


def listen(name: str) -> socket.socket:
    """A listening socket with the abstract name ``name``. Raises OSError when the name is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind("\0" + name)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def check_peer(connection: socket.socket) -> int:
    """The pid at the other end. Raises PermissionError unless it runs for the same user."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", data)
    if uid != os.geteuid():
        raise PermissionError(f"the other end belongs to user {uid}, this process to user {os.geteuid()}")
    return int(pid)
