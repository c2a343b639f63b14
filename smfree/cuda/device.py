"""Devices: the entry to everything else in smfree.cuda."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from smfree.cuda import ipc, peers
from smfree.cuda.cache import CompileCache
from smfree.cuda.calls import Calls, PrimaryContext
from smfree.cuda.capabilities import read_capabilities
from smfree.cuda.choose import choose, choose_all
from smfree.cuda.compile_cuda import CudaSource, compile_cuda
from smfree.cuda.compile_triton import TritonSource, compile_triton
from smfree.cuda.errors import (
    ArrayError,
    CompileError,
    NoDeviceError,
    TensorMapError,
    UnavailableError,
)
from smfree.cuda.image import ModuleImage
from smfree.cuda.interop import wrap
from smfree.cuda.memory import Allocation, DeviceArray, HostBuffer, as_dtype, as_shape
from smfree.cuda.module import Module
from smfree.cuda.numa import host_array, node_of
from smfree.cuda.peers import Memory
from smfree.cuda.streams import Event, Stream
from smfree.cuda.tensormap import TensorMap, encode, spec_for
from smfree.cuda.tracing import traced


class Closable(Protocol):
    """A driver object that ends with its device."""

    def close(self) -> None: ...


class Device:
    """One GPU, real or emulated. Use :meth:`open`; a context manager that waits for queued work, raises what
    failed in it, and closes.

    ``spec`` is what was opened (``cuda:0``, ``emu:h100``, ``emu:h100x8:3``), ``clock_source`` how its times
    come about: ``measured`` on a GPU, ``modelled`` on an emulated one.
    """

    def __init__(self, driver: Any, ordinal: int = 0, *, spec: str, is_emulated: bool) -> None:
        self.spec = spec
        self.ordinal = ordinal
        self.is_emulated = is_emulated
        self.driver = driver
        self.calls = Calls(driver, spec=spec, emulated=is_emulated)
        self.calls("cuInit", 0)
        count = int(self.calls("cuDeviceGetCount"))
        if ordinal >= count:
            raise NoDeviceError(f"{spec} was asked for, but the driver has {count} devices")
        self.handle = self.calls("cuDeviceGet", ordinal, ordinal=ordinal)
        self.capabilities = read_capabilities(self.calls, self.handle)
        self.peers: set[int] = set()
        """Ordinals of the devices whose memory this one may use (:meth:`enable_peer_access`)."""
        self._context: PrimaryContext | None = PrimaryContext(self.calls, self.handle)
        self.calls.context = self._context.handle
        self.default_stream = Stream(self, driver.CUstream(0), owned=False)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet([self.default_stream])
        self._allocations: weakref.WeakSet[Allocation] = weakref.WeakSet()
        self._handles: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._modules: dict[object, Module] = {}
        self.imports = ipc.Imports(self)
        """What is open of other processes' memory; ``len`` counts the allocations."""
        self.cache = CompileCache()

    @staticmethod
    def open(
        spec: str | None = None,
        *,
        ordinal: int = 0,
        schedule: str = "timed",
        seed: int = 0,
        strict: str = "error",
    ) -> Device:
        """Open one GPU: number ``ordinal`` of those that ``spec`` names.

        ``spec`` is ``auto``, ``cuda``, ``cuda:1``, ``cuda:0,2``, ``emu:PROFILE`` or ``emu:PROFILExN`` (None:
        ``SMFREE_DEVICE``, else ``auto``). ``schedule`` and ``seed`` choose how an emulated GPU interleaves
        warps; only ``timed`` has a clock. ``strict``: what it does with findings that hardware usually
        forgives, ``error``, ``record`` (see :attr:`findings`) or ``off``.
        Raises DeviceSpecError for an unknown string or ordinal, or for ``strict`` of a real GPU,
        NoDeviceError when ``cuda:N`` is not there.
        """
        choice = choose(spec, ordinal=ordinal, schedule=schedule, seed=seed, strict=strict)
        return Device(choice.driver, choice.ordinal, spec=choice.spec, is_emulated=choice.is_emulated)

    @staticmethod
    def open_all(
        spec: str | None = None, *, schedule: str = "timed", seed: int = 0, strict: str = "error"
    ) -> list[Device]:
        """Open every GPU that ``spec`` names: peers on one machine, whose memory they can exchange.

        ``cuda`` and ``auto`` are all real GPUs, ``cuda:0,2`` these two, ``emu:h100x8`` the eight of one
        emulated node. Each is closed for itself; the others stay open. They share what is compiled.
        Parameters and errors as :meth:`open`.
        """
        devices: list[Device] = []
        try:
            for one in choose_all(spec, schedule=schedule, seed=seed, strict=strict):
                devices.append(Device(one.driver, one.ordinal, spec=one.spec, is_emulated=one.is_emulated))
                devices[-1].cache = devices[0].cache
        except BaseException:
            for device in devices:
                device.close()
            raise
        return devices

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self.calls.closed and self.calls.failed is None:
                self.synchronize()  # what failed and was never asked for must not pass unseen
        finally:
            self.close()

    def __repr__(self) -> str:
        return f"Device({self.spec!r}, {self.name!r})"

    @property
    def name(self) -> str:
        """The GPU's name."""
        return self.capabilities.name

    @property
    def clock_source(self) -> str:
        """``measured`` or ``modelled``."""
        return "modelled" if self.is_emulated else "measured"

    @property
    def has_clock(self) -> bool:
        """Whether kernels may read a clock: on an emulated GPU only the schedule ``timed`` has one."""
        return not self.is_emulated or bool(self.driver.node.clocked)

    def host_seconds(self) -> float:
        """The host's clock, of which differences mean something: ``time.perf_counter`` beside a GPU, beside
        an emulated one the modelled time that this process has spent in driver calls and waits.

        :attr:`clock_source` says which. Code between driver calls costs nothing on the modelled one. Raises
        UnavailableError for a schedule without a clock.
        """
        if not self.is_emulated:
            return time.perf_counter()
        if not self.has_clock:
            raise UnavailableError(
                f"the schedule '{self.driver.node.schedule}' has no clock; open the device with "
                "schedule='timed'"
            )
        return float(self.driver.host_seconds())

    @property
    def driver_version(self) -> tuple[int, int]:
        """The CUDA version that the driver supports, for example ``(13, 0)``."""
        version = int(self.calls("cuDriverGetVersion"))
        return version // 1000, version % 1000 // 10

    @property
    def uuid(self) -> str:
        """The GPU's UUID in hexadecimal."""
        return bytes(self.calls("cuDeviceGetUuid", self.handle).bytes).hex()

    @property
    def emulator(self) -> Any:
        """The emulated GPU's state (memory, counters, last launch), None on a real GPU."""
        return self.driver.node.devices[self.ordinal] if self.is_emulated else None

    @property
    def findings(self) -> tuple[Any, ...]:
        """What ``strict="record"`` has collected so far, oldest first: errors with ``rule`` and, as text, the
        report. Always empty on a real GPU, which checks nothing."""
        return tuple(self.driver.node.findings) if self.is_emulated else ()

    def trace(self, *, ctas: Collection[int] = (0,)) -> AbstractContextManager[Any]:
        """Record what launches in a ``with`` block do and when, on the modelled clock: emulated GPUs only.

        Gives a :class:`smfree.emulator.trace.Trace`, complete when the block ends; its ``save(path)`` writes
        what ``smfree timeline`` draws. ``ctas``: the CTAs of each launch that are kept. Raises TraceError.
        """
        return traced(self, ctas)

    # --- compile ------------------------------------------------------------------------------------

    def compile_image(self, source: CudaSource | TritonSource) -> ModuleImage:
        """Compile for this device's architecture without loading. Raises CompileError."""
        if isinstance(source, TritonSource):
            return compile_triton(source, self.capabilities.compute_capability, cache=self.cache)
        return compile_cuda(source, self.capabilities.arch, cache=self.cache)

    def compile(self, source: CudaSource | TritonSource) -> Module:
        """Compile and load; the same source gives the same module again (a changed header needs a new
        device)."""
        if not isinstance(source, (CudaSource, TritonSource)):
            raise CompileError(
                f"a source is a CudaSource or a TritonSource (got {type(source).__name__}); for a file use "
                "CudaSource(path)"
            )
        key = (source, source.stamp())
        if key not in self._modules:
            self._modules[key] = Module(self, self.compile_image(source))
        return self._modules[key]

    def load(self, image: ModuleImage) -> Module:
        """Load an image that is already compiled."""
        return Module(self, image)

    # --- memory -------------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.uint8) -> DeviceArray:
        """An uninitialised array (reading it before writing is an error on an emulated GPU)."""
        dims, wanted = as_shape(shape), as_dtype(dtype)
        nbytes = math.prod(dims) * wanted.itemsize
        ptr = int(self.calls("cuMemAlloc", max(nbytes, 1), bytes=nbytes))
        allocation = Allocation(self.calls, ptr, nbytes)
        self._allocations.add(allocation)
        return DeviceArray(self, allocation, 0, dims, wanted)

    def asarray(self, data: Any) -> DeviceArray:
        """A new device array with a copy of host data: a numpy array, a CPU tensor of torch, a list, a
        buffer."""
        array = data.array if isinstance(data, HostBuffer) else np.asarray(data)
        if array.dtype.kind not in "iufbV" or array.dtype.hasobject:
            raise ArrayError(f"device arrays hold numbers or plain structures (got dtype {array.dtype})")
        return self.empty(array.shape, array.dtype).copy_from(array)

    def wrap(self, thing: Any) -> DeviceArray:
        """View memory of another library, without a copy, through ``__cuda_array_interface__`` or DLPack
        (torch).

        Raises ArrayError for host memory, other devices' memory, read-only or strided arrays.
        """
        return wrap(self, thing)

    @property
    def numa_node(self) -> int | None:
        """The host's NUMA node that is near; None where neither driver nor system tells."""
        return node_of(self)

    def pinned(
        self,
        shape: int | Sequence[int],
        dtype: DTypeLike = np.uint8,
        *,
        mapped: bool = False,
        numa_node: int | None = None,
    ) -> HostBuffer:
        """Page-locked host memory; with ``mapped`` kernels may use it too.

        ``numa_node``: where its pages lie (zeroed then); None: where the driver puts them. Raises
        UnavailableError where the machine has no such node.
        """
        dims = as_shape(shape)
        flags = 0x3 if mapped else 0x1  # CU_MEMHOSTALLOC_PORTABLE: also for other GPUs; _DEVICEMAP
        array = host_array(self.calls, self._context, numa_node, dims, dtype, pinned=True, flags=flags)
        device_ptr = None
        if mapped:
            device_ptr = int(self.calls("cuMemHostGetDevicePointer", array.ctypes.data, 0))
        return HostBuffer(self, array, pinned=True, device_ptr=device_ptr)

    def pageable(
        self, shape: int | Sequence[int], dtype: DTypeLike = np.uint8, *, numa_node: int | None = None
    ) -> HostBuffer:
        """Ordinary host memory, zeroed, so that its pages exist. ``numa_node`` as for :meth:`pinned`."""
        array = host_array(self.calls, self._context, numa_node, as_shape(shape), dtype, pinned=False)
        return HostBuffer(self, array, pinned=False)

    def tensor_map(self, array: DeviceArray, box: Sequence[int], **options: Any) -> TensorMap:
        """Encode a tensor map of ``array``; see :func:`smfree.cuda.tensormap.spec_for` for the options.

        ``box`` and all options are in the array's order (innermost last); a kernel's coordinates are
        innermost first. Raises TensorMapError with the rule, or KernelFaultError when the context had
        failed before.
        """
        if not self.capabilities.has_tma:
            raise TensorMapError(
                f"{self.name} ({self.capabilities.arch}) has no TMA, so no tensor maps; use cp.async"
            )
        if not isinstance(array, DeviceArray) or array.device is not self:
            raise TensorMapError(
                f"a tensor map describes an array of the same device (got {array!r}); use device.asarray"
            )
        return encode(self.calls, spec_for(array, box, **options), array.allocation)

    # --- streams ------------------------------------------------------------------------------------

    def stream(self, *, non_blocking: bool = False) -> Stream:
        """A new stream. Unless ``non_blocking``, the default stream and it wait for each other."""
        stream = Stream(self, self.calls("cuStreamCreate", 1 if non_blocking else 0))
        self._streams.add(stream)
        return stream

    def event(self, *, timing: bool = True, interprocess: bool = False) -> Event:
        """A new event. ``interprocess``: one that :func:`smfree.cuda.ipc.export_event` takes, without
        timing."""
        flags = 0x6 if interprocess else 0 if timing else 0x2  # CU_EVENT_INTERPROCESS, _DISABLE_TIMING
        handle = self.calls("cuEventCreate", flags)
        return Event(self, handle, timing=timing and not interprocess, interprocess=interprocess)

    # --- peers --------------------------------------------------------------------------------------

    def can_access_peer(self, peer: Device) -> bool:
        """Whether kernels and copies of this device can be allowed to use memory of ``peer``.

        It says nothing about CUDA IPC; see :func:`smfree.cuda.ipc.ipc_unavailable`.
        """
        return peers.can_access_peer(self, peer)

    def enable_peer_access(self, peer: Device) -> None:
        """Let kernels and copies of this device use memory of ``peer``: one direction only. Twice is fine.

        Raises DriverError naming both devices, PeerError when they are not on one machine.
        """
        peers.enable_peer_access(self, peer)

    def copy(self, dst: Memory, src: Memory, *, stream: Stream | None = None) -> None:
        """Copy bytes between any two memories, asynchronously on a stream of this device (default: its
        default stream): arrays of any device of the machine, host buffers, numpy arrays.

        Sizes in bytes agree. Pinned and device memory must stay as it is until the copy is done; between two
        devices :func:`smfree.cuda.peers.path_between` tells the way. Raises ArrayError.
        """
        peers.copy(self, dst, src, stream)

    def copy_batch(
        self, pairs: Iterable[tuple[Memory, Memory]], *, stream: Stream | None = None
    ) -> peers.CopyWay:
        """Copy each (dst, src) as :meth:`copy` does, in any order among themselves, in one driver call where
        the driver has it. Returns which way it was."""
        return peers.copy_batch(self, pairs, stream)

    def open_ipc(self, handle: ipc.MemoryHandle) -> DeviceArray:
        """The array that another process exported with :func:`smfree.cuda.ipc.export`, for this device.

        A handle that is open already is not opened again. Raises IpcError with what the driver's refusal
        means.
        """
        return self.imports.open(handle)

    def open_ipc_event(self, handle: ipc.EventHandle) -> Event:
        """The event that another process exported with :func:`smfree.cuda.ipc.export_event`."""
        return ipc.open_event(self, handle)

    def synchronize(self) -> None:
        """Wait for everything queued on the device. Raises KernelFaultError when a kernel failed."""
        self.calls("cuCtxSynchronize")
        for stream in self._streams:
            stream.settled()

    def track(self, thing: Allocation | Closable) -> None:
        """Free or close ``thing`` when the device is closed."""
        if isinstance(thing, Allocation):
            self._allocations.add(thing)
        else:
            self._handles.add(thing)

    def owns(self, ptr: int, nbytes: int) -> bool:
        """Whether these bytes lie inside one live array that this object allocated."""
        return any(
            a.ptr <= ptr and ptr + nbytes <= a.ptr + a.nbytes for a in self._allocations if not a.freed
        )

    def check(self, api: str, returned: Any, **what: object) -> Any:
        """Check what a driver function returned, for calls made by hand: gives its values or raises
        DriverError."""
        return self.calls.check(api, returned, **what)

    def close(self) -> None:
        """Free everything. Device arrays, streams and kernels of a closed device raise DeviceClosedError."""
        if self.calls.closed:
            return
        if not self.is_emulated:  # unloading the module of a kernel that still runs is undefined
            self.calls.quiet("cuCtxSynchronize")
        for stream in list(self._streams):
            stream.destroy()
        for module in self._modules.values():
            module.unload()
        for allocation in list(self._allocations):
            allocation.free()
        for handle in list(self._handles):
            handle.close()
        self._modules.clear()
        self.calls.close()
        self._context = None
