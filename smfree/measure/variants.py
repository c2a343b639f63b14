"""The same emulated device with one parameter of its clock changed, for sensitivity runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

#: Sections of a profile that only one engine's time can depend on.
ENGINE_SECTIONS = {"lsu": "lsu", "cp_async": "cp.async", "tma": "tma"}

#: Sections that no time inside a kernel depends on.
_OUTSIDE = ("host",)

#: Sections and parameters that no collective depends on: it has no clusters, products, pageable memory.
_NOT_GATHERED = ("cluster.", "cp_async.", "issue.mma", "host.pcie_pageable", "host.graph", "link.far_numa")


def clock_parameters(device: Any, engines: tuple[str, ...]) -> list[str]:
    """Paths of the parameters that may matter to kernels of ``engines``; those of other engines are left
    out."""
    found = []
    for row in device.emulator.profile.parameters(clock_only=True):
        section = row.path.split(".")[0]
        owner = ENGINE_SECTIONS.get(section)
        mine = owner is None or any(
            engine.split(".")[0] in (owner, owner.split(".")[0]) for engine in engines
        )
        if section not in _OUTSIDE and mine:
            found.append(row.path)
    return found


def gather_parameters(device: Any, ways: tuple[str, ...]) -> list[str]:
    """Paths of the parameters that may matter to collectives of ``ways``, the host's too."""
    unused = _NOT_GATHERED if any("tma" in way.split(".") for way in ways) else (*_NOT_GATHERED, "tma.")
    return [
        row.path
        for row in device.emulator.profile.parameters(clock_only=True)
        if not row.path.startswith(unused)
    ]


@contextmanager
def varied_node(devices: Sequence[Any], parameter: str | None, factor: float) -> Iterator[None]:
    """:func:`varied` for all emulated devices of a node, and its links."""
    links = devices[0].driver.node.links
    before = links.profiles
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(varied(device, parameter, factor))
        links.profiles = tuple(device.emulator.profile for device in devices)
        try:
            yield
        finally:
            links.profiles = before


@contextmanager
def varied(device: Any, parameter: str | None, factor: float) -> Iterator[None]:
    """Within the block the emulated device runs with ``parameter`` scaled by ``factor`` (None: unchanged).

    The L2 is empty at the start of the block, and its old content is back afterwards.
    """
    from smfree.emulator.clock import Clock
    from smfree.emulator.l2 import L2
    from smfree.emulator.specs import LINE_BYTES

    state = device.emulator
    before = state.profile, state.clock, state.l2
    profile = state.profile if parameter is None else state.profile.replace(parameter, factor=factor)
    state.profile, state.clock = profile, Clock(profile)
    state.l2 = L2(profile, -(-profile.device.memory_bytes // LINE_BYTES))
    try:
        yield
    finally:
        state.profile, state.clock, state.l2 = before
