"""What ranks need of each other beside their kernels: bytes, barriers, file descriptors, word of deaths."""

from __future__ import annotations

from typing import Protocol


class Rendezvous(Protocol):
    """Ranks ``0`` to ``world_size - 1`` that make the same calls in the same order.

    ``what`` names a call in errors and is checked: every rank must say the same. ``timeout_s`` bounds the
    wait of one call (None: the rendezvous' own). After an error other than of its arguments a rendezvous is
    of no further use. One thread at a time may use it.
    """

    @property
    def rank(self) -> int:
        """This process's number."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        ...

    def all_gather(self, data: bytes, what: str, *, timeout_s: float | None = None) -> list[bytes]:
        """The bytes of every rank, by rank; of any size, which may differ.

        Raises PeerLost, RendezvousTimeout, RendezvousMismatch.
        """
        ...

    def barrier(self, what: str, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called. Raises as :meth:`all_gather`."""
        ...

    def send_fd(self, rank: int, fd: int, what: str, *, timeout_s: float | None = None) -> None:
        """Give another rank of this host a duplicate of a file descriptor; pairs with its :meth:`recv_fd`."""
        ...

    def recv_fd(self, rank: int, what: str, *, timeout_s: float | None = None) -> int:
        """The next descriptor that ``rank`` sends here. The caller closes it."""
        ...

    def check(self, what: str = "") -> None:
        """Raise PeerLost if a rank has died or failed; ``what`` says what this rank is waiting for. Never
        waits and costs some 20 microseconds: call it in polling loops."""
        ...

    def close(self, reason: str = "") -> None:
        """Leave. The others may go on among themselves; with a ``reason`` this rank has failed, and they get
        PeerLost with it. A second call does nothing."""
        ...
