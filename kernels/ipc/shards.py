"""What an AllGather moves: one shard per rank, and where it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from kernels.common import OperandError, bytes_shared, check_whole
from kernels.ipc.group import Group
from kernels.ipc.symmetric import Symmetric
from smfree.cuda import DeviceArray

Sources = None | DeviceArray | Symmetric | Sequence[DeviceArray | Symmetric]


@dataclass(frozen=True, eq=False)
class Shards:
    """``counts[r]`` bytes of rank r go to ``offsets[r]`` of every rank's ``dst``. ``sources``: the shards of
    the local ranks, as bytes."""

    dst: Symmetric
    counts: tuple[int, ...]
    sources: Mapping[int, DeviceArray]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each shard starts in dst; one more entry, the size of dst."""
        return (0, *accumulate(self.counts))

    def src(self, rank: int) -> DeviceArray:
        """The shard of a local rank."""
        return self.sources[rank]

    def place(self, rank: int, owner: int, shard: int) -> DeviceArray:
        """Where ``shard`` goes in the dst of rank ``owner``, as local rank ``rank`` sees it."""
        return self.dst.peer(rank, owner).bytes_view(self.offsets[shard], self.counts[shard])

    def in_place(self, rank: int) -> bool:
        """Whether a local rank's shard lies in its place already."""
        return self.src(rank).ptr == self.place(rank, rank, rank).ptr


def make_shards(group: Group, dst: Symmetric, src: Sources, counts: Sequence[int] | None) -> Shards:
    """Check the operands of an AllGather (:func:`kernels.ipc.allgather.allgather`). Raises OperandError."""
    if not isinstance(dst, Symmetric) or dst.group is not group:
        whose = "another group's" if isinstance(dst, Symmetric) else type(dst).__name__
        raise OperandError(f"dst must be symmetric memory of the group (got {whose}); use group.symmetric")
    given = given_sources(group, src)
    sizes = _counts(group, dst, given, counts)
    shards = Shards(dst, sizes, {})
    sources = {}
    for member in group.members:
        place = shards.place(member.rank, member.rank, member.rank)
        found = place if given is None else given[member.rank]
        own = dst.array(member.rank).ptr
        for start in (own,) if group.direct_reason is not None else dst.pointers(member.rank):
            _check_source(f"rank {member.rank}'s src", found, place.ptr, start, dst.nbytes)
        sources[member.rank] = found.bytes_view()
    return Shards(dst, sizes, sources)


def given_sources(group: Group, src: Sources, name: str = "src") -> dict[int, DeviceArray] | None:
    """The arrays of the local ranks; None when all are in place. Raises OperandError."""
    if src is None:
        return None
    one = isinstance(src, DeviceArray | Symmetric)
    listed = [src] * len(group.members) if isinstance(src, Symmetric) else [src] if one else list(src)  # type: ignore[arg-type]
    if len(listed) != len(group.members):
        raise OperandError(
            f"{name} has one array per rank of this process, {len(group.members)} (got {len(listed)}); give "
            "them in the order of group.members"
        )
    found = {}
    for member, thing in zip(group.members, listed, strict=True):
        array = thing.array(member.rank) if isinstance(thing, Symmetric) else thing
        if not isinstance(array, DeviceArray) or array.device is not member.device:
            where = array.device.spec if isinstance(array, DeviceArray) else type(array).__name__
            raise OperandError(
                f"rank {member.rank}'s {name} must be an array of its device {member.device.spec} "
                f"(got {where}); make it with group.member({member.rank}).device.asarray"
            )
        found[member.rank] = array
    return found


def _counts(
    group: Group, dst: Symmetric, given: Mapping[int, DeviceArray] | None, counts: Sequence[int] | None
) -> tuple[int, ...]:
    """Bytes per rank: as given, else equal parts of dst."""
    world_size = group.world_size
    if counts is None:
        if dst.nbytes % world_size:
            raise OperandError(
                f"dst must be {world_size} equal shards (got {dst.nbytes} bytes); pass counts for ragged ones"
            )
        sizes = (dst.nbytes // world_size,) * world_size
    else:
        sizes = tuple(check_whole("counts", count) for count in counts)
        if len(sizes) != world_size or min(sizes) < 0:
            raise OperandError(f"counts are bytes of each of the {world_size} ranks (got {list(sizes)})")
        if sum(sizes) != dst.nbytes:
            raise OperandError(
                f"dst must have as many bytes as all shards (got {dst.nbytes}, the counts sum up to "
                f"{sum(sizes)}); take dst.bytes_view(0, {sum(sizes)})"
            )
    for rank, array in (given or {}).items():
        if array.nbytes != sizes[rank]:
            raise OperandError(
                f"rank {rank}'s src must have the {sizes[rank]} bytes of its shard (got {array.nbytes}); "
                "slice it, or pass counts"
            )
    return sizes


def _check_source(name: str, src: DeviceArray, place: int, dst: int, nbytes: int) -> None:
    """``src`` lies at ``place``, its part of the own dst, or shares no byte with the dst of a rank."""
    shared = bytes_shared(src, dst, nbytes)
    if shared and src.ptr != place:
        raise OperandError(
            f"{name} must be its own part of dst or share nothing with dst (they share {shared} bytes, "
            f"{src.ptr - dst} bytes into dst instead of {place - dst}); copy it, or pass src=None"
        )
