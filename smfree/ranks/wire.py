"""Framed messages and file descriptors over a non-blocking Unix stream socket."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

_HEADER = struct.Struct("<BxHIQ")
"""Kind, bytes of ``what``, serial, bytes of ``data``."""
_CHUNK_BYTES = 1 << 18
_FD_SPACE = socket.CMSG_SPACE(16 * array.array("i").itemsize)


class Kind(IntEnum):
    """What a message is for."""

    HELLO = 1
    ALL_GATHER = 2
    BARRIER = 3
    DESCRIPTOR = 4
    LEFT = 5

    def __str__(self) -> str:
        return {Kind.DESCRIPTOR: "send_fd"}.get(self, self.name.lower())


@dataclass(frozen=True)
class Message:
    """One message. ``serial`` counts its sender's collective calls; ``what`` is the caller's name for it."""

    kind: Kind
    serial: int = 0
    what: str = ""
    data: bytes = b""

    def __str__(self) -> str:
        return f"{self.kind} {self.what!r}"

    def encode(self) -> bytes:
        """Header, name, data."""
        what = self.what.encode()
        return _HEADER.pack(self.kind, len(what), self.serial, len(self.data)) + what + self.data


def decode(buffer: bytes | bytearray) -> tuple[Message, int] | None:
    """The message at the start of ``buffer`` and its length; None while it is incomplete. ValueError."""
    if len(buffer) < _HEADER.size:
        return None
    kind, what_bytes, serial, data_bytes = _HEADER.unpack_from(buffer)
    body = _HEADER.size + what_bytes
    if len(buffer) < body + data_bytes:
        return None
    what = bytes(buffer[_HEADER.size : body]).decode()
    return Message(Kind(kind), serial, what, bytes(buffer[body : body + data_bytes])), body + data_bytes


class Link:
    """One connection. Messages that arrived are in ``inbox``, descriptors of DESCRIPTOR messages in ``fds``.

    ``ended``: the other side closed its end, or it broke.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.inbox: deque[Message] = deque()
        self.fds: deque[int] = deque()
        self.ended = False
        self._incoming = bytearray()
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()

    @property
    def peer(self) -> tuple[int, int]:
        """(pid, uid) of the process at the other end, as the kernel says (SO_PEERCRED). pid is 0 for one of
        another pid namespace."""
        credentials = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        return pid, uid

    @property
    def has_outgoing(self) -> bool:
        """Whether something is not sent yet."""
        return bool(self._outgoing)

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Queue a message and send what the socket takes now."""
        self._outgoing.append((memoryview(message.encode()), list(fds)))
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._outgoing and not self.ended:
            view, fds = self._outgoing[0]
            try:
                sent = socket.send_fds(self.socket, [view], fds) if fds else self.socket.send(view)
            except BlockingIOError:
                return
            except ConnectionError:  # what the other side had sent before can still be read
                self._outgoing.clear()
                return
            self._outgoing.popleft()
            if sent < len(view):
                self._outgoing.appendleft((view[sent:], []))

    def receive(self) -> None:
        """Take in everything that has arrived."""
        while not self.ended:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(_CHUNK_BYTES, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                break
            except OSError:
                data, ancillary = b"", []
            for level, kind, packed in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self.fds.extend(array.array("i", packed))
            self._incoming += data
            self.ended = not data
            self._parse()

    def _parse(self) -> None:
        while True:
            try:
                decoded = decode(self._incoming)
            except ValueError:
                self.ended = True  # not one of ours
                return
            if decoded is None:
                return
            message, length = decoded
            del self._incoming[:length]
            self.inbox.append(message)

    def close(self) -> None:
        """Close the socket and every descriptor that nobody took."""
        self.ended = True
        self.socket.close()
        while self.fds:
            with contextlib.suppress(OSError):
                os.close(self.fds.popleft())
