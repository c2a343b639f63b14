"""Host memory on a chosen NUMA node, and which node a GPU is near (Linux).

A GPU's copies to and from the memory of another CPU socket cross the sockets' link. The node is chosen with
mbind(2), whose policy must be set before the pages are touched; the pages stay where they are once the
driver has locked them.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from smfree.cuda.errors import DriverError, UnavailableError
from smfree.cuda.memory import as_dtype, pinned_array

if TYPE_CHECKING:
    from smfree.cuda.calls import Calls
    from smfree.cuda.device import Device

_MBIND = {"x86_64": 237, "aarch64": 235}
"""Numbers of the system call (the kernel's unistd tables); the C library has no wrapper."""
_MPOL_BIND = 2
_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def nodes() -> tuple[int, ...]:
    """The NUMA nodes of this machine that have memory; (0,) where Linux does not tell."""
    try:
        return _parse((_NODES / "has_memory").read_text())
    except (OSError, ValueError):
        return (0,)


def node_of_pci(bus_id: str) -> int | None:
    """The node near a PCI device such as ``0000:1b:00.0``; None where the machine does not tell (-1)."""
    try:
        node = int((_PCI / bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def node_of(device: Device) -> int | None:
    """The NUMA node near a GPU: CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID (CUDA 12.2), else its PCI device's; None
    where neither tells."""
    name = getattr(device.driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID", None)
    if name is not None:
        try:
            node = int(device.calls("cuDeviceGetAttribute", name, device.ordinal))
        except DriverError as error:
            if error.code_name != "CUDA_ERROR_INVALID_VALUE":  # what an older driver says
                raise
        else:
            if node >= 0:
                return node
    if device.is_emulated:
        return None
    bus_id = device.calls("cuDeviceGetPCIBusId", 32, device.ordinal)
    return node_of_pci(bus_id.split(b"\0", 1)[0].decode())


def host_array(
    calls: Calls,
    context: object,
    node: int | None,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    *,
    pinned: bool,
    flags: int = 0,
) -> NDArray[Any]:
    """An array in host memory, freed with its last view; ``context`` lives as long. Zeroed unless it is
    pinned without a ``node``.

    ``node``: the NUMA node, None for any. ``pinned``: page-locked, with ``flags`` of cuMemHostAlloc (those of
    cuMemHostRegister are the same). An emulated machine has its own nodes, whatever this one has. Raises
    UnavailableError.
    """
    wanted = as_dtype(dtype)
    if node is None or calls.emulated:
        array = pinned_array(calls, context, shape, wanted, flags) if pinned else _zeroed(shape, wanted)
        return array if node is None else _place_emulated(calls, array, node)
    nbytes = math.prod(shape) * wanted.itemsize
    memory = memory_on(node, nbytes)
    base: Any = (ctypes.c_uint8 * len(memory)).from_buffer(memory)
    if pinned:
        ptr = ctypes.addressof(base)
        calls("cuMemHostRegister", ptr, len(memory), flags, bytes=nbytes, numa_node=node)
        weakref.finalize(base, _unregister, calls, context, ptr)
    return np.frombuffer(base, np.uint8, nbytes).view(wanted).reshape(shape)


def _zeroed(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Ordinary memory whose pages exist, which those of numpy.zeros need not."""
    array: NDArray[Any] = np.empty(shape, dtype)
    array[...] = np.zeros((), dtype)
    return array


def _place_emulated(calls: Calls, array: NDArray[Any], node: int) -> NDArray[Any]:
    ptr, place = int(array.ctypes.data), calls.driver.place_host_memory
    try:
        place(ptr, array.nbytes, node)
    except ValueError as error:
        raise UnavailableError(str(error)) from None
    root: Any = array
    while getattr(root, "base", None) is not None:
        root = root.base
    weakref.finalize(root, place, ptr, array.nbytes, None)
    return array


def _unregister(calls: Calls, context: object, ptr: int) -> None:
    del context
    calls.quiet("cuMemHostUnregister", ptr)


def memory_on(node: int, nbytes: int) -> mmap.mmap:
    """New zeroed memory whose pages exist and all lie on ``node``.

    Raises UnavailableError where there is no such node, or no way to choose one.
    """
    known = nodes()
    if node not in known:
        raise UnavailableError(
            f"this machine has no NUMA node {node} (it has {', '.join(map(str, known))}); use one of them"
        )
    number = _MBIND.get(platform.machine())
    if number is None or not hasattr(os, "sched_getaffinity"):
        raise UnavailableError(f"memory cannot be put on a NUMA node on {platform.platform()}; use Linux")
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mask = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    bits = len(mask) * _WORD_BITS + 1  # the kernel counts one more than it reads
    libc = ctypes.CDLL(None, use_errno=True)
    length = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(length),
        ctypes.c_int(_MPOL_BIND),
        mask,
        ctypes.c_ulong(bits),
        ctypes.c_uint(0),
    )
    if failed:
        code = ctypes.get_errno()
        raise UnavailableError(
            f"mbind to NUMA node {node} failed: {os.strerror(code)} (errno {code}); a container may forbid "
            "it (it takes the capability SYS_NICE there), or the node is outside its cpuset"
        )
    for page in range(0, len(memory), mmap.PAGESIZE):
        memory[page] = 0
    return memory


def _parse(text: str) -> tuple[int, ...]:
    """``0-1,3`` as (0, 1, 3)."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)
