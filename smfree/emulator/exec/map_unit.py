"""Tensor maps of one launch: where they lie, who edited them, who may use them.

A map in global memory is read through the tensormap proxy (PTX ISA, "tensormap.replace", "membar/fence").
An edit has to be released (``fence.proxy.tensormap::generic.release`` or ``tensormap.cp_fenceproxy``), then
acquired (``fence.proxy.tensormap::generic.acquire``) once by each CTA that uses the map, also when the host
put it there (CUDA C++ Programming Guide, "Using TMA to transfer multi-dimensional arrays"). A CTA has
acquired the 128 bytes that it saw at its last acquire; whoever changed them since, it has to acquire again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.bytespace import shown
from smfree.emulator.errors import CopyFault, Severity, Unsupported
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_unit import OWN_CTA_ONLY
from smfree.emulator.exec.values import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW_BYTES
from smfree.emulator.tensormap import MAP_BYTES, TensorMap, decode, replace

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch

_CHUNK = 16
MAP_ALIGNMENT = 64


class MapUnit:
    """``edited``: maps in global memory that tensormap.replace changed and nobody released, with the lane and
    place; ``acquired``: the bytes of each map as each CTA slot acquired them."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.memory = launch.device.memory
        self.edited: dict[int, tuple[int, str]] = {}
        self.acquired: dict[tuple[int, int], bytes] = {}
        self._params: dict[int, TensorMap] = {}
        self._decoded: dict[bytes, TensorMap] = {}

    def retire(self, slots: Any) -> None:
        """CTAs have exited; what they acquired holds for nobody else."""
        if self.acquired:
            gone = set(slots.tolist())
            self.acquired = {k: v for k, v in self.acquired.items() if k[0] not in gone}

    # ---------------------------------------------------------------- use

    def parts(self, g: Group, addresses: Any) -> Iterator[tuple[Any, TensorMap, bool]]:
        """(positions of lanes, their map, whether it lies in global memory), one for each different map."""
        first = int(addresses[0])
        if (addresses == first).all() and first // WINDOW_BYTES == PARAM_WINDOW // WINDOW_BYTES:
            yield slice(None), self._of_param(0, first), False
            return
        maps: dict[tuple[TensorMap, bool], list[int]] = {}
        for i, address in enumerate(addresses.tolist()):
            window = address // WINDOW_BYTES * WINDOW_BYTES
            if window == PARAM_WINDOW:
                key = self._of_param(i, address), False
            else:
                key = self._of_global(g, i, address), True
            maps.setdefault(key, []).append(i)
        for (tensor, in_memory), which in maps.items():
            yield np.array(which), tensor, in_memory

    def check_window(self, addresses: Any) -> None:
        """A map in local memory means that the compiler copied a by-value parameter: case E14.

        NVRTC 13.5 converts the address of a parameter twice, for sm_100 and later, in a process that has
        compiled for one of them with --device-debug; ptxas adds the window's base twice then.
        """
        window = addresses // WINDOW_BYTES * WINDOW_BYTES
        twice = np.flatnonzero(window == 2 * PARAM_WINDOW)
        if len(twice):
            raise CopyFault(
                "the tensor map's address has been through cvta.param twice, as NVRTC 13.5 makes it once a "
                "process has compiled with --device-debug for sm_100 or later; compile in a new process",
                rule="tensormap.address_converted_twice",
                index=int(twice[0]),
            )
        local = np.flatnonzero(window == LOCAL_WINDOW)
        if len(local):
            raise CopyFault(
                "the tensor map lies in local memory: the compiler copied a by-value parameter there, and "
                "the copy is not visible to the TMA; declare the kernel parameter `const __grid_constant__`",
                rule="tensormap.local",
                index=int(local[0]),
            )
        shared = np.flatnonzero(window == SHARED_WINDOW)
        if len(shared):
            raise CopyFault(
                "the tensor map lies in shared memory; the TMA reads maps from kernel parameters, constant "
                "or global memory: publish it with tensormap.cp_fenceproxy",
                rule="tensormap.shared",
                index=int(shared[0]),
            )

    def _of_param(self, index: int, address: int) -> TensorMap:
        offset = address - PARAM_WINDOW
        if offset not in self._params:
            self._aligned(np.array([offset]), index)
            self._params[offset] = decode(self.launch.params[offset : offset + MAP_BYTES])
        return self._params[offset]

    def _of_global(self, g: Group, index: int, address: int) -> TensorMap:
        self._aligned(np.array([address]), index)
        self.memory.check_range(address, MAP_BYTES, "tensor map", index)
        raw = bytes(self.memory.read(address, MAP_BYTES))
        found = self._decoded.get(raw)
        if found is None:
            try:
                found = self._decoded[raw] = decode(raw)
            except (CopyFault, Unsupported) as fault:
                fault.index = index
                raise
        slot = int(g.lanes.slot[index])
        if address in self.edited:
            lane, place = self.edited[address]
            self._missing(
                f"tensormap.replace by {self.launch.name_lane(lane)} at {place} was not released to the "
                "tensormap proxy; execute fence.proxy.tensormap::generic.release.gpu after the edit (or "
                "edit in shared memory and use tensormap.cp_fenceproxy), then acquire",
                "tensormap.release",
                address,
                index,
            )
        elif self.acquired.get((slot, address)) != raw and not self._constant(address):
            before = "since it changed" if (slot, address) in self.acquired else "yet"
            self._missing(
                f"no thread of {self.launch.name_cta(slot)} has acquired it {before}; execute "
                "fence.proxy.tensormap::generic.acquire.gpu [map], 128 (.sys after a copy by the host) "
                "before the first use in each CTA",
                "tensormap.acquire",
                address,
                index,
            )
        return found

    def _constant(self, address: int) -> bool:
        """In a __constant__ variable: no thread can have changed it."""
        home = self.memory.allocation_of(address)
        return home is not None and home.label.startswith(".const ")

    def _missing(self, text: str, rule: str, address: int, index: int) -> None:
        self.launch.report(
            CopyFault(
                f"tensor map at 0x{address:x} in global memory: {text}",
                rule=rule,
                severity=Severity.STRICT,
                index=index,
            )
        )

    # ---------------------------------------------------------------- edits and fences

    def replace(self, g: Group, space: str, addresses: Any, field: str, ordinal: int, values: Any) -> None:
        """``tensormap.replace`` of one field; ``values`` int64[n] in PTX's numbering."""
        lanes = g.lanes
        self._aligned(addresses)
        if space in ("shared", "cluster"):
            addresses = self.launch.memory.flat_shared(lanes, addresses, MAP_BYTES, OWN_CTA_ONLY)
            memory: Any = self.launch.memory.shared
        elif space == "global":
            memory = self.memory
        else:
            raise CopyFault(
                f"tensormap.replace works on global and shared memory (the address is in {space} memory)",
                rule="tensormap.space",
                index=0,
            )
        _, first = np.unique(addresses, return_index=True)  # a warp may edit one map together
        for i in first.tolist():
            where = addresses[i : i + 1]
            old = b"".join(memory.load(where + c, 8, 2).tobytes() for c in range(0, MAP_BYTES, _CHUNK))
            try:
                new = np.frombuffer(replace(old, field, ordinal, int(values[i])), np.uint64)
            except CopyFault as fault:
                fault.index = i
                raise
            for c in range(0, MAP_BYTES, _CHUNK):
                memory.store(where + c, new[c // 8 : c // 8 + 2].reshape(1, 2))
            if memory is self.memory:
                self.edited[int(where[0])] = int(lanes.ids[i]), self.launch.here(g)
        self.launch.did_something()

    def copy_and_release(self, g: Group, dst: Any, src: Any) -> None:
        """``tensormap.cp_fenceproxy``: shared to global memory, then release."""
        flat = self.launch.memory.flat_shared(g.lanes, src, MAP_BYTES, OWN_CTA_ONLY)
        self._aligned(dst)
        pairs = np.unique(np.stack((dst, flat), axis=1), axis=0, return_index=True)[1]
        for i in sorted(pairs.tolist()):
            for c in range(0, MAP_BYTES, _CHUNK):
                words = self.launch.memory.shared.load(flat[i : i + 1] + c, 8, 2)
                self.memory.store(dst[i : i + 1] + c, words)
            self.edited.pop(int(dst[i]), None)
        self.launch.did_something()

    def release(self, g: Group) -> None:
        """``fence.proxy.tensormap::generic.release``: edits by threads of these CTAs."""
        threads, slots = self.launch.geometry.threads, set(g.lanes.slots.tolist())
        self.edited = {a: e for a, e in self.edited.items() if e[0] // threads not in slots}

    def acquire(self, g: Group, addresses: Any) -> None:
        """``fence.proxy.tensormap::generic.acquire [address], 128``."""
        self._aligned(addresses)
        for slot, address in set(zip(g.lanes.slot.tolist(), addresses.tolist(), strict=True)):
            if address // WINDOW_BYTES:
                raise CopyFault(
                    f"fence.proxy.tensormap::generic.acquire takes an address in global memory (got "
                    f"{shown(address)})",
                    rule="tensormap.space",
                    index=0,
                )
            self.memory.check_range(address, MAP_BYTES, "tensor map")
            if address not in self.edited:
                self.acquired[slot, address] = bytes(self.memory.read(address, MAP_BYTES))

    def _aligned(self, addresses: Any, index: int | None = None) -> None:
        off = np.flatnonzero(addresses % MAP_ALIGNMENT)
        if len(off):
            raise CopyFault(
                f"a tensor map must be {MAP_ALIGNMENT}-byte aligned (got {shown(int(addresses[off[0]]))}); "
                "align its buffer to 128 bytes",
                rule="tensormap.map_alignment",
                index=int(off[0]) if index is None else index,
            )
