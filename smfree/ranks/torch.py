"""Ranks under torchrun, on one host or several, by the store of torch.distributed.

Each process group has such a store; no process group is made, so neither NCCL nor Gloo is needed. The ranks
of one host meet over Unix sockets as well: descriptors go that way, deaths are noticed that way, and when all
ranks are on one host everything does. What dies on another host is noticed by time-out.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from smfree.ranks.errors import PeerLost, RankError, RendezvousMismatch, RendezvousTimeout, named
from smfree.ranks.unix import UnixRendezvous
from smfree.ranks.wire import Kind, Message, decode

_Answer = TypeVar("_Answer")
_LONGEST_NAP_S = 0.02


class TorchRendezvous:
    """A :class:`smfree.ranks.Rendezvous` through a store of torch.distributed.

    ``store``, ``rank``, ``world_size``: default: what ``env://`` gives, from RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT. ``timeout_s``: default of every call. Raises RankError without torch, RendezvousTimeout.
    """

    def __init__(
        self,
        *,
        store: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if store is None:
            store, rank, world_size = _from_environment(timeout_s)
        if rank is None or world_size is None:
            raise RankError("a store of your own needs rank and world_size, too")
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._serial = 0
        self._local: UnixRendezvous | None = None
        self._members: tuple[int, ...] = ()
        self._store = store
        made = self._ask(lambda: store.add(f"smfree/made by {rank}", 1))
        self._prefix = f"smfree/{made}"
        cards = self._through_store(
            Message(Kind.HELLO, what="hosts", data=f"{_host()} {secrets.token_hex(16)}".encode()), timeout_s
        )
        hosts = [card.split()[0] for card in cards]
        self._members = tuple(peer for peer in range(world_size) if hosts[peer] == hosts[rank])
        name = cards[self._members[0]].split()[1].decode()
        self._local = UnixRendezvous(
            name, self._members.index(rank), len(self._members), timeout_s=timeout_s, labels=self._members
        )

    def __enter__(self) -> TorchRendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")

    @property
    def _here(self) -> UnixRendezvous:
        assert self._local is not None
        return self._local

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return len(self._members) == self.world_size

    def all_gather(self, data: bytes, what: str, *, timeout_s: float | None = None) -> list[bytes]:
        """See :meth:`smfree.ranks.Rendezvous.all_gather`."""
        if self.one_host:
            return self._here.all_gather(data, what, timeout_s=timeout_s)
        return self._through_store(Message(Kind.ALL_GATHER, what=what, data=bytes(data)), timeout_s)

    def barrier(self, what: str, *, timeout_s: float | None = None) -> None:
        """See :meth:`smfree.ranks.Rendezvous.barrier`."""
        if self.one_host:
            self._here.barrier(what, timeout_s=timeout_s)
        else:
            self._through_store(Message(Kind.BARRIER, what=what), timeout_s)

    def send_fd(self, rank: int, fd: int, what: str, *, timeout_s: float | None = None) -> None:
        """See :meth:`smfree.ranks.Rendezvous.send_fd`. Raises RankError for a rank of another host."""
        self._here.send_fd(self._neighbour(rank, f"send_fd {what!r}"), fd, what, timeout_s=timeout_s)

    def recv_fd(self, rank: int, what: str, *, timeout_s: float | None = None) -> int:
        """See :meth:`smfree.ranks.Rendezvous.recv_fd`. Raises RankError for a rank of another host."""
        return self._here.recv_fd(self._neighbour(rank, f"recv_fd {what!r}"), what, timeout_s=timeout_s)

    def _neighbour(self, rank: int, doing: str) -> int:
        if rank not in self._members:
            raise RankError(
                f"{doing}: a descriptor stays on its host, which has {named(self._members)} (got {rank})"
            )
        return self._members.index(rank)

    def check(self, what: str = "") -> None:
        """See :meth:`smfree.ranks.Rendezvous.check`; for the ranks of this host."""
        self._here.check(what)

    def close(self, reason: str = "") -> None:
        """See :meth:`smfree.ranks.Rendezvous.close`."""
        self._here.close(reason)

    # --- through the store --------------------------------------------------------------------------

    def _through_store(self, mine: Message, timeout_s: float | None) -> list[bytes]:
        """Set one key per rank and call, and wait for those of the others."""
        serial, doing = self._serial, str(mine)
        self._serial += 1
        self._ask(lambda: self._store.set(self._key(serial, self.rank), mine.encode()))
        missing = set(range(self.world_size)) - {self.rank}
        gathered = {self.rank: mine.data}
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline, nap_s = time.monotonic() + limit_s, 0.001
        while missing:
            for peer in sorted(missing):
                if self._ask(lambda peer=peer: self._store.check([self._key(serial, peer)])):  # type: ignore[misc]
                    gathered[peer] = self._read(serial, peer, mine)
                    missing.remove(peer)
            if not missing:
                break
            if self._local is not None:
                self._local.check(doing)
            if time.monotonic() > deadline:
                raise RendezvousTimeout(
                    f"rank {self.rank} waited {limit_s:g} s in {doing} for {named(missing)}: not called, or "
                    "gone with its host",
                    sorted(missing),
                )
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        if serial:  # every rank has called this one, so all have read the one before
            self._ask(lambda: self._store.delete_key(self._key(serial - 1, self.rank)))
        return [gathered[peer] for peer in range(self.world_size)]

    def _key(self, serial: int, rank: int) -> str:
        return f"{self._prefix}/{serial}/{rank}"

    def _read(self, serial: int, peer: int, mine: Message) -> bytes:
        decoded = decode(bytes(self._ask(lambda: self._store.get(self._key(serial, peer)))))
        assert decoded is not None
        theirs = decoded[0]
        if (theirs.kind, theirs.what) != (mine.kind, mine.what):
            raise RendezvousMismatch(
                f"rank {peer} is in {theirs} and rank {self.rank} in {mine}; all ranks must make the same "
                "calls in the same order"
            )
        return theirs.data

    def _ask(self, call: Callable[[], _Answer]) -> _Answer:
        try:
            return call()
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            raise PeerLost(f"rank {self.rank} lost the store of torch.distributed: {error}") from error


def _from_environment(timeout_s: float) -> tuple[Any, int, int]:
    """(store, rank, world size) as torch.distributed finds them."""
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise RankError(f"ranks under torchrun need torch ({error}); pip install 'smfree[torch]'") from None
    if not distributed.is_available():
        raise RankError("this torch was built without torch.distributed; install another build")
    return next(iter(distributed.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))


def _host() -> str:
    """What the processes that can meet over an abstract Unix socket have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/net')}"
