"""Ranks of one host over Unix sockets: every rank has a connection to every other.

So each sees for itself, at once, that another's process has ended, also by SIGKILL: the kernel closes its
socket, and a pid file descriptor tells even when a forked child still holds a copy of it. The sockets are
abstract (unix(7)): they have no file, so nothing stays behind. Only processes of the same user are let in.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType

from smfree.ranks.errors import PeerLost, RankError, RendezvousMismatch, RendezvousTimeout, named
from smfree.ranks.meeting import Meeting
from smfree.ranks.wire import Kind, Link, Message

_LOOK_S = 60.0
"""The longest wait between two looks."""
_FAREWELL_S = 1.0
"""How long ``close`` tries to send what is left."""


class UnixRendezvous:
    """A :class:`smfree.ranks.Rendezvous` of the processes that name the same ``name`` on one host.

    Returns when all ranks have come, or raises RendezvousTimeout naming those that have not after
    ``timeout_s``, which is also the default of every later call. ``labels``: the ranks' numbers in errors,
    when they are part of a larger world. ``launcher``: a connection on which the parent process sends
    (rank, how it ended).
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        *,
        timeout_s: float = 60.0,
        labels: Sequence[int] | None = None,
        launcher: Connection | None = None,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise RankError(f"rank is 0 to world_size - 1 (got rank {rank} of {world_size})")
        if timeout_s <= 0:
            raise RankError(f"timeout_s is a positive number of seconds (got {timeout_s})")
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._labels = tuple(labels) if labels is not None else tuple(range(world_size))
        self._launcher = launcher
        self._links: dict[int, Link] = {}
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._lost: dict[int, str] = {}
        """How ranks that died or failed did so."""
        self._left: set[int] = set()
        """Ranks that closed their rendezvous without a failure."""
        self._last: dict[int, str] = {}
        self._serial = 0
        self._broken = ""
        self._closed = False
        if world_size > 1:
            try:
                self._meet()
            except BaseException as error:
                self.close(f"{type(error).__name__}: {error}")
                raise

    def __enter__(self) -> UnixRendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")

    def __repr__(self) -> str:
        return f"UnixRendezvous({self.name!r}, {self._me} of {self.world_size})"

    def _meet(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        with Meeting(self.name, self.rank, self.world_size, self._labels) as meeting:
            while meeting.absent():
                meeting.step()
                absent = meeting.absent()
                for peer, link in meeting.links.items() - self._links.items():
                    self._links[peer] = link
                    self._watch(peer, link)
                self._poll(0.0)
                self._check_lost(f"the meeting of rendezvous {self.name!r}", absent)
                if absent and time.monotonic() > deadline:
                    raise RendezvousTimeout(
                        f"{self._me} waited {self.timeout_s:g} s for {self._named(absent)} to come to the "
                        f"rendezvous {self.name!r}",
                        self._numbers(absent),
                    )

    def _watch(self, peer: int, link: Link) -> None:
        self._pids[peer] = pid = link.peer[0]
        if pid and pid != os.getpid():
            with contextlib.suppress(OSError):  # an old kernel: the socket alone tells
                self._pidfds[peer] = os.pidfd_open(pid)

    # --- calls --------------------------------------------------------------------------------------

    def all_gather(self, data: bytes, what: str, *, timeout_s: float | None = None) -> list[bytes]:
        """See :meth:`smfree.ranks.Rendezvous.all_gather`."""
        return self._collective(Message(Kind.ALL_GATHER, self._serial, what, bytes(data)), timeout_s)

    def barrier(self, what: str, *, timeout_s: float | None = None) -> None:
        """See :meth:`smfree.ranks.Rendezvous.barrier`."""
        self._collective(Message(Kind.BARRIER, self._serial, what), timeout_s)

    def _collective(self, mine: Message, timeout_s: float | None) -> list[bytes]:
        self._check_usable(str(mine))
        self._serial += 1
        for link in self._links.values():
            link.send(mine)

        def missing() -> list[int]:
            for peer, link in self._links.items():
                if link.inbox and self._call_of(link.inbox[0]) != self._call_of(mine):
                    self._mismatch(peer, link.inbox[0], str(mine))
            return [peer for peer, link in self._links.items() if not link.inbox or link.has_outgoing]

        self._wait(missing, str(mine), timeout_s)
        gathered = {peer: link.inbox.popleft() for peer, link in self._links.items()}
        self._last.update((peer, str(message)) for peer, message in gathered.items())
        return [mine.data if r == self.rank else gathered[r].data for r in range(self.world_size)]

    @staticmethod
    def _call_of(message: Message) -> tuple[Kind, int, str]:
        return message.kind, message.serial, message.what

    def send_fd(self, rank: int, fd: int, what: str, *, timeout_s: float | None = None) -> None:
        """See :meth:`smfree.ranks.Rendezvous.send_fd`."""
        doing = f"send_fd {what!r}"
        link = self._link_to(rank, doing)
        try:
            os.fstat(fd)
        except OSError:
            raise RankError(f"{doing}: {fd} is no open file descriptor of this process") from None
        link.send(Message(Kind.DESCRIPTOR, what=what), (fd,))
        self._wait(lambda: [rank] if link.has_outgoing else [], doing, timeout_s)

    def recv_fd(self, rank: int, what: str, *, timeout_s: float | None = None) -> int:
        """See :meth:`smfree.ranks.Rendezvous.recv_fd`."""
        doing = f"recv_fd {what!r}"
        link = self._link_to(rank, doing)
        wanted = Message(Kind.DESCRIPTOR, what=what)

        def missing() -> list[int]:
            if link.inbox and self._call_of(link.inbox[0]) != self._call_of(wanted):
                self._mismatch(rank, link.inbox[0], doing)
            return [] if link.inbox else [rank]

        self._wait(missing, doing, timeout_s)
        self._last[rank] = str(link.inbox.popleft())
        return link.fds.popleft()

    def _link_to(self, rank: int, doing: str) -> Link:
        self._check_usable(doing)
        if rank not in self._links:
            raise RankError(
                f"{doing}: a descriptor goes to another rank, 0 to {self.world_size - 1} but not "
                f"{self.rank} itself (got {rank})"
            )
        return self._links[rank]

    def check(self, what: str = "") -> None:
        """See :meth:`smfree.ranks.Rendezvous.check`."""
        self._check_usable(what)
        if self.world_size > 1:
            self._poll(0.0)
            self._check_lost(what)

    def close(self, reason: str = "") -> None:
        """See :meth:`smfree.ranks.Rendezvous.close`."""
        if self._closed:
            return
        self._closed = True
        for link in self._links.values():
            link.send(Message(Kind.LEFT, what=reason[:4096]))
        deadline = time.monotonic() + _FAREWELL_S
        while (left := deadline - time.monotonic()) > 0 and any(
            link.has_outgoing and not link.ended for link in self._links.values()
        ):
            self._poll(left)
        for link in self._links.values():
            link.close()
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()

    # --- waiting ------------------------------------------------------------------------------------

    def _wait(self, missing: Callable[[], list[int]], doing: str, timeout_s: float | None) -> None:
        """Poll until nobody is missing. Raises PeerLost, RendezvousTimeout."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        self._poll(0.0)
        while absent := missing():
            self._check_lost(doing, absent)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                states = "; ".join(self._state(peer) for peer in absent)
                text = f"{self._me} waited {limit_s:g} s in {doing} for {self._named(absent)}: {states}"
                raise self._break(RendezvousTimeout(text, self._numbers(absent)))
            self._poll(left_s)

    def _state(self, peer: int) -> str:
        last = f"; its last call was {self._last[peer]}" if peer in self._last else ""
        if self._links[peer].inbox:
            return f"{self._label(peer)} has called but does not take what is sent to it{last}"
        return f"{self._label(peer)} is alive but has not called{last}"

    def _check_lost(self, doing: str, absent: Sequence[int] = ()) -> None:
        """Raise if a rank died or failed, or one that is waited for has left."""
        gone = dict(self._lost)
        gone.update((peer, "has closed its rendezvous") for peer in absent if peer in self._left)
        if not gone:
            return
        first = {peer: text for peer, text in gone.items() if PeerLost.__name__ not in text}
        gone = first or gone  # not those that failed because of others
        how = "; ".join(f"{self._label(peer)} {text}" for peer, text in sorted(gone.items()))
        where = f"in {doing} " if doing else ""
        waited = f"{self._me} waited {where}for {self._named(absent or gone)}: {how}"
        raise self._break(PeerLost(waited, self._numbers(gone)))

    def _mismatch(self, peer: int, message: Message, doing: str) -> None:
        raise self._break(
            RendezvousMismatch(
                f"{self._label(peer)} is in {message} and {self._me} in {doing}; all ranks must make the "
                "same calls in the same order"
            )
        )

    def _check_usable(self, doing: str) -> None:
        if self._closed:
            raise RankError(f"{doing or 'check'}: this rendezvous of {self._me} is closed; make a new one")
        if self._broken:
            raise RankError(f"{doing or 'check'}: this rendezvous had failed before: {self._broken}")

    def _break(self, error: RankError) -> RankError:
        self._broken = str(error)
        return error

    def _poll(self, timeout_s: float) -> None:
        """Wait until something happens, at most ``timeout_s``, and take it in."""
        poller = select.poll()
        for link in self._links.values():
            if not link.ended:
                poller.register(link.socket, select.POLLIN | (select.POLLOUT if link.has_outgoing else 0))
        for fd in self._pidfds.values():
            poller.register(fd, select.POLLIN)
        if self._launcher is not None:
            poller.register(self._launcher, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(max(0.0, min(timeout_s, _LOOK_S)) * 1e3)}
        ended = [peer for peer, fd in self._pidfds.items() if fd in ready]
        for peer, link in self._links.items():
            if not link.ended and (link.socket.fileno() in ready or peer in ended):
                link.flush()
                link.receive()
            self._note_end(peer, link, peer in ended)
        for peer in ended:
            os.close(self._pidfds.pop(peer))
        if self._launcher is not None and self._launcher.fileno() in ready:
            self._hear()

    def _note_end(self, peer: int, link: Link, process_ended: bool) -> None:
        """Take a farewell out of the inbox; an end without one is a death."""
        if link.inbox and link.inbox[-1].kind is Kind.LEFT:
            reason = link.inbox.pop().what
            if reason:
                self._lost.setdefault(peer, f"failed: {reason}")
            else:
                self._left.add(peer)
        elif (link.ended or process_ended) and peer not in self._left:
            pid = self._pids.get(peer)
            self._lost.setdefault(peer, "has died" + (f" (its process {pid} is gone)" if pid else ""))

    def _hear(self) -> None:
        """What the launcher says of ranks that ended."""
        assert self._launcher is not None
        try:
            peer, how = self._launcher.recv()
            self._lost[peer] = how
        except EOFError:
            self._lost.setdefault(self.rank, "has lost its launcher, whose process is gone")
            self._launcher = None

    # --- names --------------------------------------------------------------------------------------

    @property
    def _me(self) -> str:
        return self._label(self.rank)

    def _label(self, peer: int) -> str:
        return f"rank {self._labels[peer]}"

    def _numbers(self, peers: Sequence[int] | dict[int, str]) -> list[int]:
        return sorted(self._labels[peer] for peer in peers)

    def _named(self, peers: Sequence[int] | dict[int, str]) -> str:
        return named(self._numbers(peers))
