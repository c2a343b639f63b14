"""What the ranks of a group tell each other on the host: in one process, or through a rendezvous.

Every exchange is collective and carries ``what``, the words for it in an error. A rank that fails says so in
the next exchange, so that its peers raise at once instead of waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, cast

from kernels.ipc.errors import GroupError
from smfree.ranks.rendezvous import Rendezvous

_Made = TypeVar("_Made")


class Exchange(Protocol):
    """Between the processes that hold the ranks of a group. ``ranks``: those of this process."""

    @property
    def world_size(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    def gather(self, data: Sequence[bytes], what: str) -> list[bytes]:
        """What every rank gives, in order of rank; ``data`` are those of ``ranks``."""

    def barrier(self, what: str) -> None:
        """Return when all ranks have come here."""

    def check(self, what: str = "") -> None:
        """Raise PeerLost when a rank is gone, never wait."""

    def fail(self, reason: str) -> None:
        """Tell the others that this process's ranks have failed: they get PeerLost with the reason."""

    def send_fd(self, peer: int, descriptor: int, what: str) -> None:
        """Give a file descriptor to another rank's process."""

    def recv_fd(self, peer: int, what: str) -> int:
        """Take one; the caller closes it."""


class InProcess:
    """All ranks in this process and this host thread: nobody to wait for."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.ranks = tuple(range(world_size))

    def gather(self, data: Sequence[bytes], what: str) -> list[bytes]:
        """``data`` itself."""
        del what
        return list(data)

    def barrier(self, what: str) -> None:
        """Nothing: everybody is here."""

    def check(self, what: str = "") -> None:
        """Nothing: everybody lives."""
        del what

    def fail(self, reason: str) -> None:
        """Nothing: nobody else has to know."""
        del reason

    def send_fd(self, peer: int, descriptor: int, what: str) -> None:
        raise GroupError(f"{what}: ranks of one process share memory without file descriptors")

    def recv_fd(self, peer: int, what: str) -> int:
        raise GroupError(f"{what}: ranks of one process share memory without file descriptors")


class Joined:
    """One rank in this process; ``rendezvous`` (smfree.ranks) reaches the others."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self.world_size = int(rendezvous.world_size)
        self.ranks = (int(rendezvous.rank),)
        self.check = rendezvous.check
        self.fail = rendezvous.close
        self.barrier = rendezvous.barrier
        self.send_fd = rendezvous.send_fd
        self.recv_fd = rendezvous.recv_fd

    def gather(self, data: Sequence[bytes], what: str) -> list[bytes]:
        """One all-gather."""
        (mine,) = data
        return list(self._rendezvous.all_gather(mine, what))


def agree(exchange: Exchange, what: str, value: str) -> None:
    """Every rank gives the same ``value``. Raises GroupError that quotes two which differ, on all ranks."""
    texts = [text.decode() for text in exchange.gather([value.encode()] * len(exchange.ranks), what)]
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise GroupError(
                f"{what}: every rank makes the same call in the same order (rank 0: {texts[0]}; rank {rank}: "
                f"{text}); look for a branch that depends on the rank"
            )


def together(exchange: Exchange, what: str, make: Callable[[], _Made]) -> _Made:
    """What ``make`` gives when it succeeds on every rank. Else the ranks on which it failed raise their own
    errors, and the others GroupError with the first of them."""
    made: _Made | None = None
    failure: Exception | None = None
    try:
        made = make()
    except Exception as error:
        failure = error
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    said = exchange.gather([text.encode()] * len(exchange.ranks), what)
    if failure is not None:
        raise failure
    failed = [(rank, words.decode()) for rank, words in enumerate(said) if words]
    if failed:
        rank, words = failed[0]
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise GroupError(f"{what} failed on rank {rank}{more}: {words}")
    return cast(_Made, made)
