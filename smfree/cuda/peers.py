"""Several GPUs of one process: peer access, the path between two of them, copies between any memories.

Peer access is one-directional: after ``a.enable_peer_access(b)`` kernels and copies of ``a`` may use memory
of ``b``, not the other way round. A copy between two devices works without it too; then the driver stages the
bytes through host memory, which is slow and looks the same from outside: :func:`path_between` tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from smfree.cuda.errors import ArrayError, DriverError, PeerError
from smfree.cuda.memory import DeviceArray, HostBuffer

if TYPE_CHECKING:
    from smfree.cuda.device import Device
    from smfree.cuda.streams import Stream

Memory = DeviceArray | HostBuffer | NDArray[Any]
"""What a copy takes: an array of any device of the machine, a host buffer, a numpy array."""


class Path(StrEnum):
    """The way of a copy between two devices."""

    LOCAL = "inside the device"
    NVLINK = "NVLink"
    PCIE = "PCIe"
    STAGED = "staged through the host"


class CopyWay(StrEnum):
    """How :meth:`Device.copy_batch` handed its copies to the driver."""

    BATCH = "cuMemcpyBatchAsync"
    ONE_BY_ONE = "cuMemcpyAsync, one by one"


def can_access_peer(device: Device, peer: Device) -> bool:
    """See :meth:`smfree.cuda.device.Device.can_access_peer`."""
    _check_same_driver(device, peer)
    if device.ordinal == peer.ordinal:
        return True
    return bool(
        device.calls("cuDeviceCanAccessPeer", device.handle, peer.handle, device=device.spec, peer=peer.spec)
    )


def enable_peer_access(device: Device, peer: Device) -> None:
    """See :meth:`smfree.cuda.device.Device.enable_peer_access`."""
    _check_same_driver(device, peer)
    if device.ordinal == peer.ordinal or peer.ordinal in device.peers:
        return
    try:
        device.calls("cuCtxEnablePeerAccess", peer.calls.context, 0, current=device.spec, peer=peer.spec)
    except DriverError as error:
        # Another library may have enabled it in the primary context. The driver API keeps no last error.
        if error.code_name != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
            raise
    device.peers.add(peer.ordinal)


def enable_peers(devices: Sequence[Device]) -> None:
    """Enable peer access between all of these, in both directions. Raises PeerError naming a pair that
    cannot."""
    for device in devices:
        for peer in devices:
            if not can_access_peer(device, peer):
                raise PeerError(
                    f"{device.spec} cannot use memory of {peer.spec}: no peer access between them (see "
                    "nvidia-smi topo -p2p r); copies between them are staged through the host"
                )
            enable_peer_access(device, peer)


def path_between(a: Device, b: Device) -> Path:
    """The way of a copy from ``a`` to ``b`` as things stand: STAGED until peer access was enabled in either
    direction (through these devices)."""
    _check_same_driver(a, b)
    if a.ordinal == b.ordinal:
        return Path.LOCAL
    enabled = b.ordinal in a.peers or a.ordinal in b.peers
    if not enabled or not _p2p(a, b.handle, "ACCESS_SUPPORTED"):
        return Path.STAGED
    return direct_link(a, b.handle)


def direct_link(device: Device, peer: Any) -> Path:
    """The link from a device to the CUdevice ``peer``, when it is used directly.

    One over which every atomic works natively is taken for NVLink (CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_
    SUPPORTED; PCIe does not carry all of them), any other one for PCIe.
    """
    return Path.NVLINK if _p2p(device, peer, "NATIVE_ATOMIC_SUPPORTED") else Path.PCIE


def _p2p(device: Device, peer: Any, name: str) -> int:
    attribute = getattr(device.driver.CUdevice_P2PAttribute, f"CU_DEVICE_P2P_ATTRIBUTE_{name}")
    return int(device.calls("cuDeviceGetP2PAttribute", attribute, device.handle, peer, attribute=name))


def _check_same_driver(device: Device, peer: Device) -> None:
    if device.driver is not peer.driver:
        raise PeerError(
            f"{device.spec} and {peer.spec} are not on one machine; open them together with "
            "Device.open_all('emu:h100x8'), or both as real GPUs"
        )
    if peer.calls.closed:
        raise PeerError(f"the peer {peer.spec} of {device.spec} is closed; open it again")


# --- copies ------------------------------------------------------------------------------------------


def copy(device: Device, dst: Memory, src: Memory, stream: Stream | None) -> None:
    """See :meth:`smfree.cuda.device.Device.copy`."""
    used = _own_stream(device, stream)
    nbytes = _check_pair(device, dst, src)
    if nbytes:
        _copy_one(device, dst, src, nbytes, used)


def _copy_one(device: Device, dst: Memory, src: Memory, nbytes: int, stream: Stream) -> None:
    to, origin = _address(dst), _address(src)
    what = {"dst": hex(to), "src": hex(origin), "bytes": nbytes}
    device.calls("cuMemcpyAsync", to, origin, nbytes, stream.handle, **what)
    stream.keep(_keeper(dst), _keeper(src))


def copy_batch(device: Device, pairs: Iterable[tuple[Memory, Memory]], stream: Stream | None) -> CopyWay:
    """See :meth:`smfree.cuda.device.Device.copy_batch`."""
    used = _own_stream(device, stream)
    sized = [(dst, src, _check_pair(device, dst, src)) for dst, src in pairs]
    wanted = [one for one in sized if one[2]]
    if not wanted or not takes_batches(device, used):
        for dst, src, nbytes in wanted:
            _copy_one(device, dst, src, nbytes, used)
        return CopyWay.ONE_BY_ONE
    driver = device.driver
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    attributes.flags = int(driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
    device.calls(
        "cuMemcpyBatchAsync",
        [driver.CUdeviceptr(_address(dst)) for dst, _, _ in wanted],
        [driver.CUdeviceptr(_address(src)) for _, src, _ in wanted],
        [nbytes for _, _, nbytes in wanted],
        len(wanted),
        [attributes],
        [0],  # the first copy that the attributes apply to
        1,
        used.handle,
        copies=len(wanted),
        bytes=sum(nbytes for _, _, nbytes in wanted),
    )
    used.keep(*(_keeper(memory) for dst, src, _ in wanted for memory in (dst, src)))
    return CopyWay.BATCH


def takes_batches(device: Device, stream: Stream) -> bool:
    """From CUDA 12.8 on, not on the legacy default stream (CUDA driver API, cuMemcpyBatchAsync) and not while
    the stream is being captured. A binding of CUDA 13 calls another entry point, which drivers have from
    CUDA 13 on."""
    if int(stream.handle) == 0 or not hasattr(device.driver, "cuMemcpyBatchAsync"):
        return False
    if device.driver_version < ((13, 0) if device.driver.CUDA_VERSION >= 13000 else (12, 8)):
        return False
    idle = int(device.driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)
    return not hasattr(device.driver, "cuStreamIsCapturing") or (
        int(device.calls("cuStreamIsCapturing", stream.handle)) == idle
    )


def _own_stream(device: Device, stream: Stream | None) -> Stream:
    used = stream or device.default_stream
    if used.device is not device:
        raise ArrayError(
            f"{device.spec} copies on its own streams (got one of {used.device.spec}); use device.stream()"
        )
    return used


def _check_pair(device: Device, dst: Memory, src: Memory) -> int:
    """Bytes of one copy. Raises ArrayError."""
    for memory in (dst, src):
        if isinstance(memory, np.ndarray) and not memory.flags.c_contiguous:
            raise ArrayError(
                f"a copy takes contiguous memory (got strides {memory.strides} of shape {memory.shape}); use "
                "numpy.ascontiguousarray"
            )
        if not isinstance(memory, DeviceArray | HostBuffer | np.ndarray):
            raise ArrayError(
                f"a copy takes a DeviceArray, a HostBuffer or a numpy array (got {type(memory).__name__}); "
                "memory of other libraries goes through device.wrap"
            )
        if isinstance(memory, DeviceArray) and memory.device.driver is not device.driver:
            raise ArrayError(
                f"{memory!r} and {device.spec} are not on one machine; open both with Device.open_all"
            )
    if isinstance(dst, np.ndarray) and not dst.flags.writeable:
        raise ArrayError("the destination is a read-only numpy array; copy into a writable one")
    if dst.nbytes != src.nbytes:
        raise ArrayError(
            f"{_shown(src)} has {src.nbytes} bytes, {_shown(dst)} has {dst.nbytes}; make them equal"
        )
    if (
        dst.nbytes
        and _address(dst) < _address(src) + src.nbytes
        and _address(src) < _address(dst) + dst.nbytes
    ):
        raise ArrayError(
            f"source and destination must not overlap (got {src.nbytes} bytes at {_address(src):#x} and "
            f"{_address(dst):#x}); copy through a third array"
        )
    return int(dst.nbytes)


def _address(memory: Memory) -> int:
    return int(memory.ctypes.data) if isinstance(memory, np.ndarray) else memory.ptr


def _keeper(memory: Memory) -> object:
    return memory.allocation if isinstance(memory, DeviceArray) else memory


def _shown(memory: Memory) -> str:
    return repr(memory) if isinstance(memory, DeviceArray) else type(memory).__name__
