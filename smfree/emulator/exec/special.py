"""Special registers. Each reader takes a group and returns a scalar where all its lanes agree, else a
column."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.exec.lanes import Group
from smfree.emulator.specs import WARP_SIZE

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder
    from smfree.emulator.exec.launch import Launch

Reader = Callable[[Group], Any]
TIMED_REGISTERS = frozenset(
    {"%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"}
)
_AXES = {"x": 0, "y": 1, "z": 2}


def reader(dec: Decoder, name: str) -> Reader:
    """The reader of a special register; refuses the ones that are not modelled."""
    launch: Launch = dec.launch
    stem, _, axis = name.partition(".")
    if axis in _AXES:
        found = _coordinate(launch, stem, _AXES[axis])
        if found is not None:
            return found
    simple: dict[str, Reader] = {
        "%laneid": lambda g: g.lanes.laneid,
        "%warpid": lambda g: g.lanes.tid // WARP_SIZE,
        "%nwarpid": lambda g: launch.max_warps_per_sm,
        "%smid": lambda g: _per_slot(g, launch.geometry.sm_of_slot[g.lanes.slots]),
        "%nsmid": lambda g: launch.geometry.num_sms,
        "%gridid": lambda g: 1,
        "%clock64": lambda g: _clock(launch, g),
        "%clock": lambda g: _low(_clock(launch, g)),
        "%clock_hi": lambda g: _high(_clock(launch, g)),
        "%globaltimer": lambda g: _globaltimer(launch, g),
        "%globaltimer_lo": lambda g: _low(_globaltimer(launch, g)),
        "%globaltimer_hi": lambda g: _high(_globaltimer(launch, g)),
        "%dynamic_smem_size": lambda g: launch.dynamic_shared_bytes,
        "%total_smem_size": lambda g: launch.shared_bytes,
        "%lanemask_eq": lambda g: np.left_shift(np.uint32(1), g.lanes.laneid.astype(np.uint32)),
        "%lanemask_lt": lambda g: (
            np.left_shift(np.uint32(1), g.lanes.laneid.astype(np.uint32)) - np.uint32(1)
        ),
        "WARP_SZ": lambda g: WARP_SIZE,
        "%cluster_ctarank": lambda g: _per_slot(g, g.lanes.slots % launch.cluster_size),
        "%cluster_nctarank": lambda g: launch.cluster_size,
        "%is_explicit_cluster": lambda g: launch.explicit_cluster,
    }
    if name not in simple:
        raise dec.refuse(f"special register {name}")
    return simple[name]


def _coordinate(launch: Launch, stem: str, axis: int) -> Reader | None:
    block, grid, cluster = launch.block, launch.grid, launch.cluster
    if stem == "%ntid":
        return lambda g: block[axis]
    if stem == "%nctaid":
        return lambda g: grid[axis]
    if stem == "%nclusterid":
        return lambda g: grid[axis] // cluster[axis]
    if stem == "%cluster_nctaid":
        return lambda g: cluster[axis]
    if stem == "%tid":
        if block[axis] == 1:
            return lambda g: 0
        stride = (1, block[0], block[0] * block[1])[axis]
        return lambda g: g.lanes.tid // stride % block[axis]
    if stem in ("%ctaid", "%clusterid", "%cluster_ctaid"):
        if grid[axis] == 1 or (stem == "%cluster_ctaid" and cluster[axis] == 1):
            return lambda g: 0
        place = {
            "%ctaid": lambda ctaid: ctaid,
            "%clusterid": lambda ctaid: ctaid // cluster[axis],
            "%cluster_ctaid": lambda ctaid: ctaid % cluster[axis],
        }[stem]
        return lambda g: _per_slot(g, place(launch.cta_coordinate(g.lanes.slots, axis)))
    return None


def _per_slot(group: Group, values: Any) -> Any:
    """One value per CTA spread over its lanes; a scalar for a single CTA."""
    return values[0] if len(values) == 1 else np.repeat(values, group.lanes.slot_counts)


def _clock(launch: Launch, group: Group) -> Any:
    cycles = np.floor(launch.now(group)).astype(np.uint64)
    return cycles[0] if len(cycles) == 1 else cycles[group.lanes.warp_index]


def _globaltimer(launch: Launch, group: Group) -> Any:
    ns = np.floor(launch.nanoseconds(launch.now(group))).astype(np.uint64)
    return ns[0] if len(ns) == 1 else ns[group.lanes.warp_index]


def _low(value: Any) -> Any:
    return value & np.uint64(0xFFFFFFFF)


def _high(value: Any) -> Any:
    return value >> np.uint64(32)
