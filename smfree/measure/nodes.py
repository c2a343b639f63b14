"""Several GPUs of one machine under one benchmark: which, who starts them together, what they moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from smfree.measure.queue import Blocker

LINKS = ("nvlink", "pcie")
TRAFFIC = ("sent_bytes", "sent_wire_bytes", "received_bytes", "received_wire_bytes")


class NodeUnavailableError(Exception):
    """The machine does not have the GPUs that a point asks for; the text is the reason of a skip."""


def node_spec(spec: str, ranks: int, gpus: int) -> str:
    """The device string of the first ``ranks`` GPUs of the machine that ``spec`` belongs to.

    An emulated machine has as many as are asked for, all of the profile of ``spec``; a real one has ``gpus``.
    """
    from smfree.cuda.choose import Kind, parse_spec

    asked = parse_spec(spec)
    if asked.kind is Kind.EMULATED:
        return f"emu:{asked.profile}x{ranks}"
    if gpus < ranks:
        raise NodeUnavailableError(f"{ranks} GPUs are needed, this machine has {gpus}")
    return "cuda:" + ",".join(map(str, range(ranks)))


def open_node(spec: str, ranks: int, context: Any = None) -> Node:
    """Open the first ``ranks`` GPUs of the machine of ``spec``; of a process among several (``context``) its
    own. Raises NodeUnavailableError."""
    if context is not None:
        if context.world_size != ranks:
            raise NodeUnavailableError(f"{ranks} ranks are needed, these are {context.world_size} processes")
        return Node([context.device])
    from smfree.cuda.choose import real_devices
    from smfree.cuda.device import Device

    gpus = 0 if spec.startswith("emu:") else real_devices()[1]
    return Node(Device.open_all(node_spec(spec, ranks, gpus)))


class Node:
    """Open ``devices`` of one machine, by rank."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self.devices = list(devices)

    @cached_property
    def blocker(self) -> Blocker:
        """Holds streams of all devices."""
        return Blocker(self.devices[0])

    @cached_property
    def _sweeps(self) -> list[Any]:
        return [device.empty(device.capabilities.l2_bytes) for device in self.devices]

    def fill_l2(self) -> None:
        """Put other lines into every emulated L2, so that what follows counts the bytes of a cold one.

        Not for timing: the lines are dirty.
        """
        for sweep in self._sweeps:
            sweep.fill(0)
            sweep.device.synchronize()

    def tally(self) -> Tally:
        """What every emulated device has counted so far; nothing of real ones."""
        return Tally(self.devices)

    def close(self) -> None:
        """Close the devices, those that failed too."""
        for device in self.devices:
            close_anyway(device)


def close_anyway(device: Any) -> None:
    """Close a device that may have failed: a dead context cannot be closed cleanly."""
    with suppress(Exception):
        device.close()


class Tally:
    """Counters of all devices at one moment; :meth:`since` is what came later, by rank.

    Beside the counters of a device (smfree.emulator.counters) its link traffic: ``nvlink_sent_bytes``,
    ``pcie_received_wire_bytes``, ... Nothing launched may be pending. A list of empty mappings on real GPUs.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self._devices = devices
        self._then = [_counted(device) for device in devices]

    def since(self) -> list[dict[str, int]]:
        return [
            {name: amount - then.get(name, 0) for name, amount in _counted(device).items()}
            for device, then in zip(self._devices, self._then, strict=True)
        ]


def _counted(device: Any) -> Mapping[str, int]:
    if not device.is_emulated:
        return {}
    counted = dict(device.emulator.counters.as_dict())
    links = getattr(device.driver.node, "links", None)  # a served node keeps them to itself
    if links is None:
        return counted
    traffic = links.traffic[device.ordinal]
    for link in LINKS:
        one = getattr(traffic, link)
        counted.update({f"{link}_{name}": getattr(one, name) for name in TRAFFIC})
    return counted
