"""The operands of a reduction, checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from kernels.common import OperandError, bytes_shared
from kernels.ipc.grid import LINE_BYTES
from kernels.ipc.shards import Sources, given_sources
from kernels.ipc.symmetric import Symmetric
from kernels.reduce.elements import Element
from kernels.reduce.workspace import Workspace
from smfree.cuda import DeviceArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Message(ABC):
    """``count`` elements of every rank. ``sources``: those of the local ranks, as bytes."""

    workspace: Workspace
    element: Element
    count: int
    sources: Mapping[int, DeviceArray]

    @property
    def nbytes(self) -> int:
        """Of one rank."""
        return self.count * self.element.bytes

    def src(self, rank: int) -> DeviceArray:
        """What a local rank gives."""
        return self.sources[rank]

    def __str__(self) -> str:
        return f"{self.count} of {self.element.value}"

    @abstractmethod
    def target(self, rank: int) -> DeviceArray:
        """Where the sum goes on a local rank, or its chunk of it."""

    def chunk(self, rank: int) -> tuple[int, int]:
        """The bytes of the message that ``rank`` owns: where they begin and end."""
        return chunk_of(self.nbytes, self.element, self.workspace.group.world_size, rank)

    def num_pieces(self, piece_bytes: int, origin: int) -> int:
        """Pieces of the chunk that is cut into most (reduce.cuh)."""
        chunks = (self.chunk(rank) for rank in range(self.workspace.group.world_size))
        return max(pieces_of(origin, begin, end, piece_bytes) for begin, end in chunks)


@dataclass(frozen=True, eq=False, kw_only=True)
class AllReduceMessage(Message):
    """The sum goes to ``dst`` of every rank. ``symmetric_src``: the terms, where they are in symmetric
    memory; dst in place."""

    dst: Symmetric
    symmetric_src: Symmetric | None = None

    def __str__(self) -> str:
        return f"{super().__str__()} at byte {self.dst.offset_bytes} of '{self.dst.label}'"

    def target(self, rank: int) -> DeviceArray:
        """Where the sum goes on a local rank."""
        return self.dst.array(rank)

    @property
    def origin(self) -> int:
        """Where dst begins in a line, the same on every rank (reduce.cuh)."""
        return self.dst.offset_bytes % LINE_BYTES


@dataclass(frozen=True, eq=False, kw_only=True)
class ReduceScatterMessage(Message):
    """Each rank's chunk of the sum goes to its target. ``targets``: those of the local ranks, as bytes."""

    targets: Mapping[int, DeviceArray]

    def target(self, rank: int) -> DeviceArray:
        """Where the chunk of a local rank goes."""
        return self.targets[rank]


def share_of(count: int, world_size: int, rank: int) -> tuple[int, int]:
    """Where the rank's share of ``count`` begins and ends: equal ones, the first ``count % world_size`` one
    longer."""
    each, more = divmod(count, world_size)
    begin = rank * each + min(rank, more)
    return begin, begin + each + (rank < more)


def chunk_of(nbytes: int, element: Element, world_size: int, rank: int) -> tuple[int, int]:
    """The bytes of a message that the rank owns, as in reduce.cuh."""
    begin, end = share_of(nbytes // element.bytes, world_size, rank)
    return begin * element.bytes, end * element.bytes


def pieces_of(origin: int, begin: int, end: int, piece_bytes: int) -> int:
    """Into how many pieces a range of a message is cut that begins ``origin`` bytes into a line."""
    return -(-((origin + begin) % LINE_BYTES + end - begin) // piece_bytes) if end > begin else 0


def piece_of(origin: int, begin: int, end: int, piece_bytes: int, j: int) -> tuple[int, int, int]:
    """As in reduce.cuh: where piece j of a range begins and ends, and where it lies in its slot."""
    skew = (origin + begin) % LINE_BYTES
    start = begin + max(0, j * piece_bytes - skew)
    stop = begin + (j + 1) * piece_bytes - skew
    return min(start, end), min(stop, end), skew if j == 0 else 0


def all_reduce_message(
    workspace: Workspace, dst: Symmetric, src: Sources, element: Element
) -> AllReduceMessage:
    """For an AllReduce into ``dst``. Raises OperandError."""
    group = workspace.group
    workspace.check()
    if not isinstance(dst, Symmetric) or dst.group is not group:
        whose = "another group's" if isinstance(dst, Symmetric) else type(dst).__name__
        raise OperandError(f"dst must be symmetric memory of the group (got {whose}); use group.symmetric")
    given = given_sources(group, src)
    sources = {}
    for member in group.members:
        own = dst.array(member.rank)
        _check_operand(workspace, member.rank, "dst", own, element)
        found = own if given is None else given[member.rank].bytes_view()
        name = f"rank {member.rank}'s src"
        _check_operand(workspace, member.rank, name, found, element)
        if found.nbytes != dst.nbytes:
            raise OperandError(
                f"{name} must have as many bytes as dst (got {found.nbytes} and {dst.nbytes}); "
                "slice the longer"
            )
        if found.ptr != own.ptr:
            for start in dst.pointers(member.rank):
                _check_apart(name, found, start, dst.nbytes)
        sources[member.rank] = found
    return AllReduceMessage(
        workspace=workspace, element=element, count=dst.nbytes // element.bytes, sources=sources, dst=dst,
        symmetric_src=dst if src is None else src if isinstance(src, Symmetric) else None,
    )  # fmt: skip


def reduce_scatter_message(
    workspace: Workspace, dst: Sources, src: Sources, element: Element
) -> ReduceScatterMessage:
    """For a ReduceScatter: ``src`` of every rank has the whole message, ``dst`` is for its chunk. Raises
    OperandError."""
    group = workspace.group
    workspace.check()
    targets, sources = given_sources(group, dst, "dst"), given_sources(group, src)
    if targets is None or sources is None:
        raise OperandError("a ReduceScatter has a src and a dst on every rank (got None); give both")
    sizes = {array.nbytes for array in sources.values()}
    if len(sizes) != 1:
        raise OperandError(f"src has the same size on every rank (got {sorted(sizes)} bytes); slice it")
    (nbytes,) = sizes
    for member in group.members:
        rank, target, source = member.rank, targets[member.rank], sources[member.rank]
        _check_operand(workspace, rank, f"rank {rank}'s src", source, element)
        _check_operand(workspace, rank, f"rank {rank}'s dst", target, element)
        begin, end = chunk_of(nbytes, element, group.world_size, rank)
        if target.nbytes != end - begin:
            raise OperandError(
                f"rank {rank}'s dst must have the {end - begin} bytes of its chunk of src (got "
                f"{target.nbytes}); slice it, chunk_of says which"
            )
        if target.ptr != source.ptr + begin:
            _check_apart(f"rank {rank}'s dst", target, source.ptr, nbytes, "its chunk of src")
    return ReduceScatterMessage(
        workspace=workspace, element=element, count=nbytes // element.bytes,
        sources={rank: array.bytes_view() for rank, array in sources.items()},
        targets={rank: array.bytes_view() for rank, array in targets.items()},
    )  # fmt: skip


def _check_operand(workspace: Workspace, rank: int, name: str, array: DeviceArray, element: Element) -> None:
    """Whole elements, aligned to one, outside the workspace's memory. Raises OperandError."""
    for what, value in (("size in bytes", array.nbytes), ("address", array.ptr)):
        if value % element.bytes:
            raise OperandError(
                f"{name} must have whole elements of {element.value}: its {what} must be a multiple of "
                f"{element.bytes} (got {value}); slice it"
            )
    check_outside(workspace, rank, name, array)


def check_outside(workspace: Workspace, rank: int, name: str, array: DeviceArray) -> None:
    """``array`` of a local rank is not where a rank's workspace keeps what is under way. Raises
    OperandError."""
    for start in workspace.memory.pointers(rank):
        shared = bytes_shared(array, start, workspace.memory.nbytes)
        if shared:
            raise OperandError(
                f"{name} must lie outside the workspace's own memory (they share {shared} bytes); use other "
                "memory"
            )


def _check_apart(name: str, array: DeviceArray, start: int, nbytes: int, other: str = "dst") -> None:
    """``array`` shares no byte with the memory at ``start``. Raises OperandError."""
    shared = bytes_shared(array, start, nbytes)
    if shared:
        raise OperandError(
            f"{name} must be {other} or share nothing with it (they share {shared} bytes); copy it"
        )
