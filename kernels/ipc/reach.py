"""Whether the GPUs of a group can use each other's memory, and over which link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from smfree.cuda import Device, Path, enable_peers

_SLOWEST_FIRST = (Path.STAGED, Path.PCIE, Path.NVLINK, Path.LOCAL)


class Placed(Protocol):
    """A local rank and its device."""

    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> Device: ...


def enable_access(devices: Sequence[Device]) -> str | None:
    """Enable peer access between all devices of one process, or say which two cannot."""
    for device in devices:
        for peer in devices:
            if not device.can_access_peer(peer):
                return f"{device.spec} cannot use memory of {peer.spec}: no peer access between them"
    enable_peers(devices)
    return None


def group_path(members: Iterable[Placed], uuids: Sequence[str], direct_reason: str | None) -> Path:
    """The slowest way from a local rank to a peer; peers of other processes are found by UUID (case D11).

    A GPU that this process does not see is reached over a link that cannot be asked about: PCIe is assumed,
    the slower one.
    """
    if direct_reason is not None:
        return Path.STAGED
    paths = {Path.LOCAL}
    for member in members:
        ordinals = _ordinals(member.device)
        for uuid in uuids:
            if uuid != member.device.uuid:
                paths.add(_link(member.device, ordinals[uuid]) if uuid in ordinals else Path.PCIE)
    return min(paths, key=_SLOWEST_FIRST.index)


def _ordinals(device: Device) -> dict[str, int]:
    """The GPUs that this process sees, by UUID."""
    count = int(device.calls("cuDeviceGetCount"))
    handles = [device.calls("cuDeviceGet", ordinal) for ordinal in range(count)]
    return {bytes(device.calls("cuDeviceGetUuid", h).bytes).hex(): i for i, h in enumerate(handles)}


def _link(device: Device, ordinal: int) -> Path:
    """As :func:`smfree.cuda.path_between`, without a context on the peer."""
    names = device.driver.CUdevice_P2PAttribute
    atomics = names.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    peer = device.calls("cuDeviceGet", ordinal)
    native = int(device.calls("cuDeviceGetP2PAttribute", atomics, device.handle, peer))
    return Path.NVLINK if native else Path.PCIE
