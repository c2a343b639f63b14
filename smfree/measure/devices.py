"""The devices of a session: resolved once, opened when first used, replaced or given up when a fault kills
one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from smfree.measure.clocks import ClockWatch
from smfree.measure.nodes import Node, close_anyway, open_node
from smfree.results.store import DeviceIdentity


def open_device(spec: str) -> Any:
    """Open a device of smfree.cuda; raises its NoDeviceError or DeviceSpecError."""
    from smfree.cuda.device import Device

    return Device.open(spec)


def real_gpu() -> bool:
    """Whether a real GPU answers."""
    from smfree.cuda.choose import real_devices

    return not real_devices()[0]


def resolve(specs: Sequence[str], fallback: Sequence[str]) -> list[str]:
    """Replace "auto" by "cuda:0" where there is a GPU and by ``fallback`` where there is none."""
    found: list[str] = []
    for spec in specs:
        if spec != "auto":
            found.append(spec)
        elif real_gpu():
            found.append("cuda:0")
        else:
            found.extend(fallback)
    return list(dict.fromkeys(found))


class DevicePool:
    """Open devices by spec. ``specs`` are the resolved ones the session runs on."""

    def __init__(self, specs: Sequence[str]) -> None:
        self.specs = list(specs)
        self.ranks: Any = None
        """What this process is among several (smfree.ranks.RankContext), None alone."""
        self.failure = ""
        """What went wrong in this rank: the others are told at the end."""
        self._open: dict[str, Any] = {}
        self._watches: dict[str, ClockWatch] = {}
        self._identities: dict[str, DeviceIdentity] = {}
        self._nodes: dict[tuple[str, int], Node] = {}

    def get(self, spec: str) -> Any:
        """The open device of ``spec``."""
        if self.ranks is not None:
            return self.ranks.device
        if spec not in self._open:
            self._open[spec] = open_device(spec)
        return self._open[spec]

    def node(self, spec: str, ranks: int) -> Node:
        """The first ``ranks`` GPUs of the machine of ``spec``, kept open. Raises NodeUnavailableError."""
        if (spec, ranks) not in self._nodes:
            self._nodes[spec, ranks] = open_node(spec, ranks, self.ranks)
        return self._nodes[spec, ranks]

    def node_of(self, device: Any) -> Node:
        """The open node that has the device."""
        return next(node for node in self._nodes.values() if device in node.devices)

    def drop_dead_nodes(self, spec: str) -> str:
        """Close the nodes beside ``spec`` of which a GPU has failed; what the last one said, empty if all
        live."""
        said = ""
        for place in [place for place in self._nodes if place[0] == spec]:
            reasons = [reason for reason in map(alive, self._nodes[place].devices) if reason]
            if reasons:
                said = reasons[0]
                self._nodes.pop(place).close()
        return said

    def watch(self, spec: str) -> ClockWatch:
        """The clock watch of a device, kept over all its points."""
        return self._watches.setdefault(spec, ClockWatch())

    def identity(self, spec: str) -> DeviceIdentity:
        if spec not in self._identities:
            self._identities[spec] = identity_of(self.get(spec))
        return self._identities[spec]

    def drop(self, spec: str) -> None:
        """Forget a device whose context died; the next :meth:`get` opens it anew."""
        device = self._open.pop(spec, None)
        if device is not None:
            close_anyway(device)

    def close(self) -> None:
        if self.ranks is not None:  # who closes the rank's GPU, when all have come to their end
            self.ranks.close(self.failure)
            return
        while self._nodes:
            self._nodes.popitem()[1].close()
        for spec in list(self._open):
            self.drop(spec)


def alive(device: Any) -> str:
    """Empty when the device still works, else the first line of what it says."""
    try:
        device.synchronize()
    except Exception as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return ""


def identity_of(device: Any) -> DeviceIdentity:
    """What makes runs on this device comparable; no momentary value."""
    capabilities = device.capabilities
    modelled = device.clock_source == "modelled"
    return DeviceIdentity(
        generation=capabilities.generation,
        gpu=device.name,
        clock_source=device.clock_source,
        uuid="" if modelled else device.uuid,
        driver="" if modelled else driver_text(device),
        model_version=model_version(device) if modelled else "",
    )


def driver_text(device: Any) -> str:
    """The CUDA version of the device's driver, e.g. "13.0"."""
    return ".".join(str(part) for part in device.driver_version)


def model_version(device: Any) -> str:
    """Profile name and a short hash of the parameters that a modelled time depends on."""
    profile = device.emulator.profile
    rows = sorted((row.path, row.value) for row in profile.parameters(clock_only=True))
    return f"{profile.key}:{hashlib.sha256(repr(rows).encode()).hexdigest()[:12]}"
