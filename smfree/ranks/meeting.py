"""How the ranks of one host find each other: each listens under its own name and connects to lower ranks."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections.abc import Sequence

from smfree.ranks.errors import RendezvousMismatch
from smfree.ranks.wire import Kind, Link, Message

_RETRY_S = 0.02
"""How often a rank knocks at one that has not come yet."""


class Meeting:
    """The way from a name to a connection with each other rank, in ``links``. Used as a context manager; what
    has not become a link is closed at its end.

    Raises RendezvousMismatch: a rank or the name is taken, or another process knows another world.
    """

    def __init__(self, name: str, rank: int, world_size: int, labels: Sequence[int]) -> None:
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.links: dict[int, Link] = {}
        self._labels = labels
        self._guests: list[Link] = []
        """Connections whose other side has not said hello."""
        self._knocked: dict[int, Link] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def __enter__(self) -> Meeting:
        try:
            self._listener.bind(self._address(self.rank))
        except OSError as error:
            self._listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            raise RendezvousMismatch(
                f"rank {self._labels[self.rank]} of rendezvous {self.name!r} is already here: two processes "
                "have this rank, or an earlier run still lives; give each its own rank, or take another name"
            ) from None
        self._listener.listen(self.world_size)
        self._listener.setblocking(False)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for guest in self._guests:
            guest.close()

    def absent(self) -> list[int]:
        """The ranks that have not come."""
        return [peer for peer in range(self.world_size) if peer != self.rank and peer not in self.links]

    def step(self) -> None:
        """Knock, welcome who has come, and wait a moment for more."""
        for peer in range(self.rank):
            if peer not in self.links and (peer not in self._knocked or self._knocked[peer].ended):
                self._knock(peer)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._take(self._listener.accept()[0])
        for guest in list(self._guests):
            guest.receive()
            if guest.inbox or guest.ended:
                self._guests.remove(guest)
                if guest.inbox:
                    self._join(guest)
                else:
                    guest.close()
        if self.absent():
            select.select([self._listener, *(guest.socket for guest in self._guests)], [], [], _RETRY_S)

    def _address(self, rank: int) -> str:
        return f"\0smfree-{os.geteuid()}-{self.name}-{rank}"

    def _knock(self, peer: int) -> None:
        """Connect to a lower rank if it listens already."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(self._address(peer))
        except (ConnectionRefusedError, BlockingIOError):
            sock.close()
            return
        guest = self._take(sock)
        if guest is None:
            raise RendezvousMismatch(
                f"another user's process has taken the name of rank {self._labels[peer]} in rendezvous "
                f"{self.name!r}; use another name"
            )
        self._knocked[peer] = guest

    def _take(self, sock: socket.socket) -> Link | None:
        """Greet a process of the same user; another's connection is closed."""
        link = Link(sock)
        if link.peer[1] != os.geteuid():
            link.close()
            return None
        link.send(Message(Kind.HELLO, self.rank, self.name, str(self.world_size).encode()))
        self._guests.append(link)
        return link

    def _join(self, guest: Link) -> None:
        hello = guest.inbox.popleft()
        peer = hello.serial
        if hello.kind is not Kind.HELLO:
            guest.close()
            return
        world_size = int(hello.data)
        if world_size != self.world_size or peer in self.links:
            pid, twice = guest.peer[0], f", and another rank {peer}" if peer in self.links else ""
            guest.close()
            raise RendezvousMismatch(
                f"process {pid} came to the rendezvous {self.name!r} as rank {peer} of {world_size}; rank "
                f"{self._labels[self.rank]} knows {self.world_size} ranks{twice}"
            )
        self.links[peer] = guest
