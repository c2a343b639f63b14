"""How many CTAs of a kernel fit on an SM, by the allocation rules of NVIDIA's occupancy calculator."""

from __future__ import annotations

from typing import NamedTuple

from smfree.emulator.specs import WARP_SIZE, DeviceSpec

_REGISTER_UNIT = 256
"""Registers are given to a warp in units of this many."""
_SHARED_UNIT = 128
"""Shared memory is given to a CTA in units of this many bytes."""
_PARTITIONS = 4
"""Sub-partitions of an SM; a warp's registers lie in one of them."""


class Occupancy(NamedTuple):
    """CTAs per SM as each resource alone would allow."""

    by_slots: int
    by_threads: int
    by_registers: int
    by_shared: int

    @property
    def ctas(self) -> int:
        return min(self)

    @property
    def limits(self) -> str:
        """ "2 by registers, 8 by threads": every limit, the tightest first."""
        names = ("CTA slots", "threads", "registers", "shared memory")
        return ", ".join(f"{count} by {name}" for count, name in sorted(zip(self, names, strict=True)))


def occupancy(spec: DeviceSpec, threads: int, registers: int | None, shared_bytes: int) -> Occupancy:
    """``threads`` and ``shared_bytes`` (static + dynamic) per CTA, ``registers`` per thread.

    Without registers (None) they limit nothing: the answer is then an upper bound.
    """
    warps = -(-threads // WARP_SIZE)
    by_registers = spec.max_ctas_per_sm if registers is None else _by_registers(spec, warps, registers)
    taken = footprint(spec, threads, registers, shared_bytes).shared_bytes
    if shared_bytes > spec.shared_bytes_per_block_optin or threads > spec.max_threads_per_block:
        return Occupancy(0, 0, 0, 0)
    return Occupancy(
        by_slots=spec.max_ctas_per_sm,
        by_threads=spec.max_warps_per_sm // warps,
        by_registers=by_registers,
        by_shared=spec.shared_bytes_per_sm // taken if taken else spec.max_ctas_per_sm,
    )


class Footprint(NamedTuple):
    """What CTAs take of an SM: slots, warps, registers, bytes of shared memory."""

    slots: int
    warps: int
    registers: int
    shared_bytes: int


def footprint(spec: DeviceSpec, threads: int, registers: int | None, shared_bytes: int) -> Footprint:
    """Of one CTA. Unknown registers (None) take nothing."""
    warps = -(-threads // WARP_SIZE)
    per_warp = 0 if registers is None else _round_up(max(1, registers) * WARP_SIZE, _REGISTER_UNIT)
    taken = _round_up(shared_bytes + spec.reserved_shared_bytes_per_block, _SHARED_UNIT)
    return Footprint(1, warps, warps * per_warp, taken)


def capacity(spec: DeviceSpec) -> Footprint:
    """Of a whole SM."""
    return Footprint(
        spec.max_ctas_per_sm, spec.max_warps_per_sm, spec.registers_per_sm, spec.shared_bytes_per_sm
    )


def resident_clusters(spec: DeviceSpec, ctas_per_sm: int, cluster_size: int) -> int:
    """Clusters of ``cluster_size`` CTAs that the device holds at once.

    Without borders between GPCs, which no cluster crosses: an upper bound.
    """
    return spec.num_sms * ctas_per_sm // cluster_size


def _by_registers(spec: DeviceSpec, warps: int, registers: int) -> int:
    per_warp = _round_up(max(1, registers) * WARP_SIZE, _REGISTER_UNIT)
    if registers > spec.registers_per_thread or per_warp * warps > spec.registers_per_block:
        return 0
    return spec.registers_per_sm // _PARTITIONS // per_warp * _PARTITIONS // warps


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
