"""Ranks that work together: their devices and streams, their symmetric memory, their signals.

``Group.local(devices)`` holds all ranks in one process and one host thread, ``Group.join(device,
rendezvous)`` one rank of several processes. A collective loops over ``group.members``, the ranks of this
process, queues on their streams and returns; ``group.wait(timeout_s)`` is where the host waits, and where it
learns who is stuck::

    with Group.local(Device.open_all("emu:h100x4")) as group:
        with group.symmetric(4 << 20, "activations") as buffer:
            allgather(group, buffer, shards, way="sm.push")
            group.wait(timeout_s=10)
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from kernels.common import check_whole
from kernels.ipc.errors import GroupError
from kernels.ipc.exchange import Exchange, InProcess, Joined, agree, together
from kernels.ipc.lane import Lane
from kernels.ipc.member import Member
from kernels.ipc.pool import Pool, rounded
from kernels.ipc.reach import enable_access, group_path
from kernels.ipc.signals import SignalLayout
from kernels.ipc.slabs import Backing, Slabs, make_first
from kernels.ipc.symmetric import Symmetric
from kernels.ipc.wait import give_up, wait
from smfree.cuda import Capabilities, CudaSource, Device, Stream
from smfree.cuda.calls import put_off_clean_up
from smfree.ranks.rendezvous import Rendezvous

if TYPE_CHECKING:
    from kernels.ipc.staged import Staging

POOL_BYTES = 64 << 20
"""Symmetric memory per rank unless asked for more or less."""


class Group:
    """``world_size`` ranks, ``members`` of them in this process. A context manager.

    ``pool_bytes`` of symmetric memory per rank; ``slots``: the largest grid of a collective. Raises
    GroupError, on every rank, when the ranks do not fit together.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        exchange: Exchange,
        *,
        pool_bytes: int,
        slots: int,
        several_per_gpu: bool,
        backing: Backing | None,
    ) -> None:
        self.world_size = exchange.world_size
        self.layout = SignalLayout(self.world_size, slots)
        self.exchange = exchange
        self.failed: Exception | None = None
        self.calls: deque[str] = deque(maxlen=8)
        """The latest collectives queued since the last wait, for its errors."""
        self._closed = False
        self.uuids = _introduce(devices, exchange, check_whole("pool_bytes", pool_bytes), slots)
        _check_gpus(self.uuids, several_per_gpu)
        seats = zip(exchange.ranks, devices, strict=True)
        self.members = tuple(Member(rank, device) for rank, device in seats)
        self._by_rank = {member.rank: member for member in self.members}
        access = enable_access(devices) if len(devices) == self.world_size else None
        self._backing = backing

        def make(nbytes: int) -> Slabs:
            agree(exchange, "growing the pool", f"{nbytes} bytes")
            return make_first(self.members, exchange, nbytes, self._backing)

        self.pool = Pool(rounded(self.layout.pad_bytes) + rounded(pool_bytes), make)
        self.direct_reason: str | None = access or self.pool.direct_reason
        """Why GPUs cannot use the peers' memory (then ``staged`` is the way that is left); None: they can."""
        signals = Symmetric(
            self, self.pool.allocate(self.layout.pad_bytes, "signals"), 0, self.layout.pad_bytes
        )
        self.lane = Lane("main", self.layout, slots, signals)
        """The lane of the members' streams; AllGathers use it."""
        self.lane.open(self.members, own_streams=False)
        self.lanes = [self.lane]
        self.staging: Staging | None = None
        """The host buffer of way ``staged``, made at its first use."""
        self.path = group_path(self.members, self.uuids, self.direct_reason)
        """The slowest way between two ranks: what a bandwidth must be stored with (case D15)."""
        exchange.barrier("making of the group")

    @classmethod
    def local(
        cls,
        devices: Sequence[Device],
        *,
        pool_bytes: int = POOL_BYTES,
        slots: int = 512,
        several_per_gpu: bool = False,
        backing: Backing | None = None,
    ) -> Group:
        """All ranks in this process, rank i on ``devices[i]``; open them together, with ``Device.open_all``.

        ``several_per_gpu`` lets devices repeat: for correctness only, a bandwidth means nothing then.
        ``backing``: as in :class:`kernels.ipc.slabs.Backing`, None for the best one.
        """
        chosen = list(devices)
        for device in chosen:
            if not isinstance(device, Device):
                raise GroupError(f"a rank has a Device (got {device!r}); use Device.open_all('emu:h100x4')")
        if not chosen:
            raise GroupError("a group has at least one rank (got no devices); pass those of Device.open_all")
        return cls(
            chosen, InProcess(len(chosen)), pool_bytes=pool_bytes, slots=slots,
            several_per_gpu=several_per_gpu, backing=backing,
        )  # fmt: skip

    @classmethod
    def join(
        cls,
        device: Device,
        rendezvous: Rendezvous,
        *,
        pool_bytes: int = POOL_BYTES,
        slots: int = 512,
        several_per_gpu: bool = False,
        backing: Backing | None = None,
    ) -> Group:
        """This process's rank of a group; every process of ``rendezvous`` (smfree.ranks) calls it alike.

        The rendezvous stays the caller's, and must stay open until the group is closed.
        """
        return cls(
            [device], Joined(rendezvous), pool_bytes=pool_bytes, slots=slots,
            several_per_gpu=several_per_gpu, backing=backing,
        )  # fmt: skip

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def __repr__(self) -> str:
        return f"Group({self.world_size} ranks, here {[member.rank for member in self.members]})"

    # --- what the ranks are -------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """Of every rank's GPU: they are of one architecture."""
        return self.members[0].device.capabilities

    @property
    def in_process(self) -> bool:
        """Whether all ranks are in this process."""
        return len(self.members) == self.world_size

    @property
    def multicast_reason(self) -> str | None:
        """Why symmetric memory has no multicast address; None when it has."""
        return self.pool.multicast_reason

    def member(self, rank: int) -> Member:
        """A rank of this process. Raises GroupError for others."""
        found = self._by_rank.get(rank)
        if found is None:
            here = ", ".join(str(known) for known in self._by_rank)
            raise GroupError(
                f"this process holds rank {here} of {self.world_size} (got {rank!r}); loop over members"
            )
        return found

    @property
    def streams(self) -> list[Stream]:
        """Everything that carries collectives of the local ranks."""
        of_members = [stream for member in self.members for stream in member.streams]
        of_lanes = [stream for lane in self.lanes for stream in lane.streams]
        return list(dict.fromkeys([*of_members, *of_lanes]))

    @property
    def alive(self) -> bool:
        """Whether it was not closed and has not failed."""
        return not self._closed and self.failed is None

    def check(self) -> None:
        """Raise GroupError when the group was closed or has failed."""
        if self._closed:
            raise GroupError("the group was closed; make a new one")
        if self.failed is not None:
            raise GroupError(
                f"the group has failed, its ranks are out of step; make a new one. {self.failed}"
            )

    def check_direct(self) -> None:
        """Raise GroupError when a rank's GPU cannot use its peers' memory."""
        if self.direct_reason is not None:
            raise GroupError(f"{self.direct_reason}; use way='staged', which goes through host memory")

    # --- what they do together ----------------------------------------------------------------------

    @contextmanager
    def queueing(self, what: str) -> Iterator[None]:
        """Around the queueing of a collective, which errors call ``what``: meanwhile nothing is freed. That
        may wait for the first rank's kernel, which waits for the second one's. The group has failed when not
        all could be queued: its ranks are out of step."""
        self.calls.append(what)
        try:
            with put_off_clean_up([member.device.calls for member in self.members]):
                yield
        except Exception as error:
            self._fail(error)
            raise

    def launch(
        self,
        what: str,
        source: CudaSource,
        ctas: int,
        threads: int,
        args: Callable[[int], Sequence[object]],
        *,
        lane: Lane | None = None,
    ) -> None:
        """Queue the kernel of ``source`` on every member's stream of the lane, with ``args(rank)``. It is
        loaded on all devices first: one that waits for its peers would keep a device from loading theirs."""
        __tracebackhide__ = True  # reports name who called this
        lane = lane or self.lane
        kernels = [member.device.compile(source).kernel() for member in self.members]
        with self.queueing(what):
            for member, kernel in zip(self.members, kernels, strict=True):
                kernel.launch(ctas, threads, args(member.rank), stream=lane.stream(member.rank))

    def _fail(self, error: BaseException) -> None:
        """Tell the peers and end the members' work because of ``error``, which is what the caller raises."""
        self.failed = error if isinstance(error, Exception) else GroupError(f"ended by {error!r}")
        with suppress(Exception):
            give_up(self, f"{type(error).__name__}: {error}")

    def symmetric(self, nbytes: int, label: str) -> Symmetric:
        """``nbytes`` on every rank, at one offset; ``label`` names it in errors.

        Collective: every rank asks for the same in the same order, else GroupError quotes two that did not.
        Raises PoolError.
        """
        self.check()
        failure: Exception | None = None
        block = None
        try:
            block = self.pool.allocate(nbytes, label)
        except GroupError as error:
            failure = error
        where = f"at offset {block.offset} of slab {block.slab}" if block else "for which it has no room"
        try:
            agree(self.exchange, "symmetric memory", f"{nbytes} bytes for '{label}' {where}")
        except BaseException:
            if block is not None:
                self.pool.free(block)
            raise
        if failure is not None:
            raise failure
        assert block is not None
        return Symmetric(self, block, 0, block.nbytes)

    def open_lane(self, ctas: int, label: str, *, slots_per_cta: int = 1, own_streams: bool) -> Lane:
        """One more lane, for up to ``ctas`` CTAs with ``slots_per_cta`` slots each: on the members' streams,
        behind and before all else there, or on new streams of its own. It begins behind the group's work.

        Collective, and slow: for before anything timed. Raises PoolError. When a rank cannot open it, the
        others raise GroupError.
        """
        self.wait()  # the lane's memory may still be used by work on other streams than the lane's
        agree(self.exchange, "opening of a lane", f"{ctas} CTAs of {slots_per_cta} slots for '{label}'")
        layout = SignalLayout(self.world_size, ctas * slots_per_cta)
        signals = self.symmetric(layout.pad_bytes, f"signals of {label}")
        lane = Lane(label, layout, ctas, signals)
        try:
            together(
                self.exchange, f"opening of {label}", lambda: lane.open(self.members, own_streams=own_streams)
            )
        except BaseException:
            lane.close()
            signals.free()
            raise
        self.lanes.append(lane)
        return lane

    def close_lane(self, lane: Lane) -> None:
        """Wait for the group's work, on all ranks, and give back what :meth:`open_lane` made. Collective.
        Raises GroupError for another lane."""
        if lane is self.lane or lane not in self.lanes:
            raise GroupError(f"{lane!r} is not open, or was not opened by open_lane; close each lane once")
        self.wait()
        self.barrier(f"closing of {lane.label}")  # nobody signals any more
        self.lanes.remove(lane)
        lane.signals.free()
        lane.close()

    def barrier(self, what: str = "barrier") -> None:
        """Return when all ranks' hosts have come here. Queued work is not waited for."""
        self.check()
        self.exchange.barrier(what)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until everything queued on the members' streams is done.

        Raises CollectiveTimeout after ``timeout_s`` wall seconds, PeerLost when a peer's process is gone:
        both after the local ranks were made to give up, with who waited for whom. The group has failed then.
        """
        self.check()
        wait(self, timeout_s)

    def close(self) -> None:
        """Wait for the members' work, close the peers' memory, free the own one, destroy the streams.

        Collective; twice is fine. Devices and rendezvous stay open. Raises, after all that, what the wait
        did. Leaving a ``with`` block by an error tells the peers, ends the members' work as after a time-out
        of :meth:`wait`, and raises it.
        """
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        if self._closed:
            return
        failure: Exception | None = None
        if self.failed is None and error is not None:
            self._fail(error)
        elif self.failed is None:
            try:
                wait(self, None)
            except Exception as late:
                failure = late
        self._closed = True
        if self.staging is not None:
            self.staging.close()
        self.pool.close()
        for lane in self.lanes:
            lane.close()
        for member in self.members:
            member.close()
        if failure is not None and error is None:
            raise failure


def _introduce(devices: Sequence[Device], exchange: Exchange, pool_bytes: int, slots: int) -> list[str]:
    """The UUIDs of all ranks' GPUs. Raises GroupError when the ranks differ in what must be alike."""
    cards = [
        json.dumps(
            {
                "uuid": device.uuid,
                "architecture": device.capabilities.arch,
                "pool_bytes": pool_bytes,
                "slots": slots,
            }
        ).encode()
        for device in devices
    ]
    told = [json.loads(card) for card in exchange.gather(cards, "introduction of the ranks")]
    for name in ("architecture", "pool_bytes", "slots"):
        for rank, card in enumerate(told):
            if card[name] != told[0][name]:
                raise GroupError(
                    f"all ranks have the same {name} (rank 0: {told[0][name]}, rank {rank}: {card[name]}); "
                    "give every rank the same"
                )
    return [str(card["uuid"]) for card in told]


def _check_gpus(uuids: Sequence[str], several_per_gpu: bool) -> None:
    for rank, uuid in enumerate(uuids):
        first = uuids.index(uuid)
        if first != rank and not several_per_gpu:
            raise GroupError(
                f"every rank has a GPU of its own (ranks {first} and {rank} both have {uuid}); give each its "
                "own (Device.open_all opens several together), or pass several_per_gpu=True to test "
                "correctness on one"
            )
