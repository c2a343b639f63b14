"""CUDA IPC: memory and events of one process, used by the GPUs of another on the same machine.

The exporting process makes a handle, sends it in any way (it pickles), and the importing one opens it::

    handle = export(array)                     # exporting process
    array = device.open_ipc(handle)            # importing process: the same bytes, at another address

Opening costs up to a millisecond and grows with the allocation, so it belongs outside of any loop. A handle
that is opened again gives the same mapping, which is closed with its last array, or its device. The
exporting process keeps the memory until all importers have let go: the driver leaves undefined what happens
otherwise (CUDA driver API, cuIpcOpenMemHandle), and neither side can see it.

That a GPU can access a peer does not mean that its driver opens the peer's handles: containers, virtual
machines and settings of the driver come between. :func:`ipc_unavailable` tries it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import secrets
import weakref
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from smfree.cuda.errors import CudaHostError, DriverError, IpcError
from smfree.cuda.memory import Allocation, DeviceArray
from smfree.cuda.streams import Event

if TYPE_CHECKING:
    from smfree.cuda.calls import Calls
    from smfree.cuda.device import Device

HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE."""
_STALE_HANDLES = 256
"""How many are remembered; the driver refuses older ones as handles of freed memory."""

_EXPORTABLE = (
    "CUDA IPC exports what cuMemAlloc gave (device.empty, cudaMalloc). PyTorch's expandable segments "
    "(PYTORCH_ALLOC_CONF=expandable_segments:True) and pools (cudaMallocAsync) give other memory: turn that "
    "setting off, or share such memory by file descriptor (smfree.cuda.vmm)"
)


@dataclass(frozen=True)
class Origin:
    """The process that exported something. ``machine`` is the kernel's boot id, ``pid_namespace`` as in
    /proc/self/ns, ``token`` random: it tells a process from a later one with the same pid."""

    pid: int
    pid_namespace: str
    machine: str
    token: str


@dataclass(frozen=True)
class MemoryHandle:
    """An array of another process: ``nbytes`` bytes from ``offset_bytes`` on in an allocation of
    ``allocation_bytes``, which the 64 bytes of ``handle`` name.

    ``base`` is the allocation's address in the exporting process, ``device_uuid`` the GPU it lies on.
    """

    handle: bytes = field(repr=False)
    base: int
    allocation_bytes: int
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device_uuid: str
    origin: Origin

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class EventHandle:
    """An event of another process."""

    handle: bytes = field(repr=False)
    device_uuid: str
    origin: Origin


# --- export ------------------------------------------------------------------------------------------


def export(array: DeviceArray) -> MemoryHandle:
    """A handle with which another process opens ``array``. Its memory must outlive every import.

    Raises IpcError for memory that the driver does not export, saying what it does export (cases D02, D03).
    """
    if not isinstance(array, DeviceArray):
        raise IpcError(
            f"CUDA IPC exports arrays of a device (got {type(array).__name__}); use device.asarray"
        )
    device = array.device
    call = device.calls
    try:
        base, allocation_bytes = call("cuMemGetAddressRange", array.ptr, ptr=hex(array.ptr))
        handle = call("cuIpcGetMemHandle", base, base=hex(int(base)), bytes=allocation_bytes)
    except DriverError as error:
        if error.code_name not in ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_FOUND"):
            raise
        raise IpcError(f"{array!r} at {array.ptr:#x} cannot be exported. {_EXPORTABLE}.\n{error}") from error
    return MemoryHandle(
        handle=ctypes.string_at(handle.getPtr(), HANDLE_BYTES),
        base=int(base),
        allocation_bytes=int(allocation_bytes),
        offset_bytes=array.ptr - int(base),
        shape=array.shape,
        dtype=array.dtype,
        device_uuid=device.uuid,
        origin=_here(device.driver),
    )


def export_event(event: Event) -> EventHandle:
    """A handle with which another process opens an event of ``device.event(interprocess=True)``."""
    if not event.interprocess:
        raise IpcError("only events of device.event(interprocess=True) can be exported; make it so")
    handle = event.device.calls("cuIpcGetEventHandle", event.handle)
    return EventHandle(
        ctypes.string_at(handle.getPtr(), HANDLE_BYTES), event.device.uuid, _here(event.device.driver)
    )


# --- import ------------------------------------------------------------------------------------------


class _Import:
    """An opened allocation; closed when the last array of it is gone."""

    def __init__(self, calls: Calls, handle: bytes, ptr: int) -> None:
        self.handle = handle
        self.ptr = ptr
        self.users: weakref.WeakSet[Allocation] = weakref.WeakSet()
        self._close = weakref.finalize(self, calls.quiet, "cuIpcCloseMemHandle", ptr)

    @property
    def closed(self) -> bool:
        """Whether it is unmapped."""
        return not self._close.alive

    def close(self) -> None:
        """Close now: every array of it is freed."""
        for user in list(self.users):
            user.free()
        self._close()


class Imports:
    """What a device has opened: each handle once, however often it is asked for (case D01)."""

    def __init__(self, device: Device) -> None:
        self._device = weakref.ref(device)
        self._open: weakref.WeakValueDictionary[bytes, _Import] = weakref.WeakValueDictionary()
        self._latest: weakref.WeakValueDictionary[tuple[Origin, int], _Import] = weakref.WeakValueDictionary()
        """What was opened last for an allocation's address in its process."""
        self._stale: deque[bytes] = deque(maxlen=_STALE_HANDLES)

    def __len__(self) -> int:
        """How many allocations are open: what is left at the end was leaked."""
        return len(self._open)

    def open(self, handle: MemoryHandle) -> DeviceArray:
        """See :meth:`smfree.cuda.device.Device.open_ipc`."""
        device = self._device()
        assert device is not None
        if not isinstance(handle, MemoryHandle):
            raise IpcError(
                f"opened is what smfree.cuda.ipc.export gave, a MemoryHandle (got {type(handle).__name__}); "
                "unpickle what the other process sent"
            )
        _check_origin(device, handle.origin, "memory", "use the array itself, on other GPUs with peer access")
        self._retire(handle)
        found = self._open.get(handle.handle)
        if found is None or found.closed:
            found = _Import(device.calls, handle.handle, _open_memory(device, handle))
            self._open[handle.handle] = self._latest[handle.origin, handle.base] = found
            device.track(found)
        user = Allocation(device.calls, found.ptr, handle.allocation_bytes, owner=found)
        found.users.add(user)
        device.track(user)
        return DeviceArray(device, user, handle.offset_bytes, handle.shape, handle.dtype)

    def _retire(self, handle: MemoryHandle) -> None:
        """Close what is open of an allocation that was freed and replaced at the same address: the driver
        refuses to map the new one over it (case D08). Raises IpcError for a handle that was replaced."""
        if handle.handle in self._stale:
            raise IpcError(
                f"the handle of process {handle.origin.pid}'s memory at {handle.base:#x} is stale: that "
                "memory was freed and allocated anew; export it again"
            )
        before = self._latest.get((handle.origin, handle.base))
        if before is not None and before.handle != handle.handle:
            self._stale.append(before.handle)
            before.close()


def _open_memory(device: Device, handle: MemoryHandle) -> int:
    """Map on ``device``, whichever number the GPU has in the exporting process (case D11)."""
    driver = device.driver
    opaque = driver.CUipcMemHandle()
    ctypes.memmove(opaque.getPtr(), handle.handle, HANDLE_BYTES)
    flag = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    what = {"bytes": handle.allocation_bytes, "exporter": handle.origin.pid, "gpu": handle.device_uuid}
    try:
        return int(device.calls("cuIpcOpenMemHandle", opaque, flag, **what))
    except DriverError as error:
        raise _refused(device, handle.device_uuid, error) from error


def open_event(device: Device, handle: EventHandle) -> Event:
    """See :meth:`smfree.cuda.device.Device.open_ipc_event`."""
    _check_origin(device, handle.origin, "an event", "use the event itself")
    opaque = device.driver.CUipcEventHandle()
    ctypes.memmove(opaque.getPtr(), handle.handle, HANDLE_BYTES)
    try:
        opened = device.calls("cuIpcOpenEventHandle", opaque, exporter=handle.origin.pid)
    except DriverError as error:
        raise _refused(device, handle.device_uuid, error) from error
    return Event(device, opened, timing=False, interprocess=False)


def _refused(device: Device, uuid: str, error: DriverError) -> Exception:
    """What a refusal to open means. A failure of the context stays what it is."""
    if device.calls.failed is not None:
        return error
    meanings = {
        "CUDA_ERROR_INVALID_HANDLE": "the exporting process freed it, or has ended; export it again",
        "CUDA_ERROR_INVALID_VALUE": "the exporting process freed it, or has ended; export it again",
        "CUDA_ERROR_ALREADY_MAPPED": "this process has it open already, outside of this device object; close "
        "that one first",
        "CUDA_ERROR_TOO_MANY_PEERS": "this GPU has no room for another peer; close imports of other GPUs",
        "CUDA_ERROR_INVALID_CONTEXT": "the exporting and the importing process must be two",
    }
    gpu = f"the GPU {uuid}" + (" itself" if uuid == device.uuid else "")
    meaning = meanings.get(
        error.code_name,
        "the driver does not join the two here, whatever peer access says; share by file descriptor "
        "(smfree.cuda.vmm) or copy through the host",
    )
    return IpcError(
        f"{device.spec} cannot open what another process exported from {gpu}: {meaning}.\n{error}"
    )


# --- who is who --------------------------------------------------------------------------------------


def _here(driver: Any) -> Origin:
    """This process, as ``driver`` sees it: to a node, two emulated drivers are two processes."""
    pid = os.getpid()
    known = _TOKENS.get(driver)
    if known is None or known[0] != pid:  # forked: another process
        known = _TOKENS[driver] = (pid, secrets.token_hex(8))
    return Origin(pid, os.readlink("/proc/self/ns/pid"), _machine(), known[1])


_TOKENS: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()


@cache
def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _check_origin(device: Device, origin: Origin, thing: str, instead: str) -> None:
    """Cases D04 and D07. Raises IpcError."""
    here = _here(device.driver)
    if origin == here:
        raise IpcError(
            f"{thing} of this very process (pid {here.pid}) was to be opened by CUDA IPC, which works "
            f"between processes only; {instead}"
        )
    if origin.machine != here.machine:
        raise IpcError(
            f"{thing} of process {origin.pid} lies on another machine (boot id {origin.machine}, here "
            f"{here.machine}); CUDA IPC joins processes of one machine"
        )
    if origin.pid_namespace != here.pid_namespace:
        raise IpcError(
            f"{thing} of process {origin.pid} lies in another pid namespace ({origin.pid_namespace}, here "
            f"{here.pid_namespace}), which CUDA IPC does not cross; start the containers with a common one, "
            "or share by file descriptor (smfree.cuda.vmm)"
        )


# --- probe -------------------------------------------------------------------------------------------


class _Ranks(Protocol):
    """The part of smfree.ranks.Rendezvous that the probe uses."""

    @property
    def rank(self) -> int: ...
    def all_gather(self, data: bytes, what: str) -> list[bytes]: ...


def ipc_unavailable(device: Device, rendezvous: _Ranks) -> str | None:
    """Why the ranks cannot use each other's memory through CUDA IPC; None when they can. The same on all.

    Collective: each rank exports a few bytes, opens those of every other and reads them (case D05).
    """
    mine, data, failure = rendezvous.rank, b"", ""
    own: DeviceArray | None = None
    try:
        own = device.asarray(_pattern(mine))
        data = pickle.dumps(export(own))
    except CudaHostError as error:
        failure = str(error)
    for peer, handle in enumerate(rendezvous.all_gather(data, "probe of CUDA IPC: handles")):
        if handle and peer != mine and not failure:
            failure = _probe(device, peer, pickle.loads(handle))
    reports = rendezvous.all_gather(failure.encode(), "probe of CUDA IPC: results")
    if own is not None:
        own.free()
    return next((f"rank {rank}: {text.decode()}" for rank, text in enumerate(reports) if text), None)


def _pattern(rank: int) -> NDArray[np.uint8]:
    return np.arange(16, dtype=np.uint8) + np.uint8(rank % 100)


def _probe(device: Device, peer: int, handle: MemoryHandle) -> str:
    """What keeps ``device`` from reading the bytes of rank ``peer``; empty when nothing does."""
    try:
        opened = device.open_ipc(handle)
        found = opened.numpy()
        opened.free()
    except CudaHostError as error:
        return str(error)
    return "" if (found == _pattern(peer)).all() else f"the memory of rank {peer} reads {bytes(found).hex()}"
