"""Whether the GPUs of a group can use each other's memory, and over which link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kernels.ipc.member import Seat
from smfree.cuda import Device, Path, enable_peers
from smfree.cuda.peers import direct_link

_SLOWEST_FIRST = (Path.STAGED, Path.PCIE, Path.NVLINK, Path.LOCAL)


def enable_access(devices: Sequence[Device]) -> str | None:
    """Enable peer access between all devices of one process, or say which two cannot."""
    for device in devices:
        for peer in devices:
            if not device.can_access_peer(peer):
                return f"{device.spec} cannot use memory of {peer.spec}: no peer access between them"
    enable_peers(devices)
    return None


def group_path(members: Iterable[Seat], uuids: Sequence[str], direct_reason: str | None) -> Path:
    """The slowest way from a local rank to a peer; peers of other processes are found by UUID (case D11).

    A GPU that this process does not see is reached over a link that cannot be asked about: PCIe is assumed,
    the slower one.
    """
    if direct_reason is not None:
        return Path.STAGED
    paths = {Path.LOCAL}
    for member in members:
        peers = _gpus(member.device)
        for uuid in uuids:
            if uuid != member.device.uuid:
                paths.add(direct_link(member.device, peers[uuid]) if uuid in peers else Path.PCIE)
    return min(paths, key=_SLOWEST_FIRST.index)


def atomics_reason(path: Path) -> str | None:
    """Why kernels whose signals are atomics must not run, None when they may. ``path``: the group's."""
    if path in (Path.LOCAL, Path.NVLINK):
        return None
    return (
        f"its signals are atomics, and the ranks' slowest link ({path}) is not known to carry all of them "
        "(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)"
    )


def _gpus(device: Device) -> dict[str, Any]:
    """The GPUs that this process sees, by UUID; it needs no context on them."""
    handles = [device.calls("cuDeviceGet", i) for i in range(int(device.calls("cuDeviceGetCount")))]
    return {bytes(device.calls("cuDeviceGetUuid", handle).bytes).hex(): handle for handle in handles}
