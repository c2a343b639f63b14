"""A driver that does what it is told: host memory for device memory, a log of calls, failures on demand."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cuda.bindings import driver as cuda

SUCCESS = cuda.CUresult.CUDA_SUCCESS
ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 * 1024,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 228 * 1024,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 1024,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "MAX_REGISTERS_PER_BLOCK": 65536,
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
    "MAX_GRID_DIM_X": 2**31 - 1,
    "MAX_GRID_DIM_Y": 65535,
    "MAX_GRID_DIM_Z": 65535,
    "MAX_BLOCK_DIM_X": 1024,
    "MAX_BLOCK_DIM_Y": 1024,
    "MAX_BLOCK_DIM_Z": 64,
    "L2_CACHE_SIZE": 50 * 2**20,
    "CLOCK_RATE": 1_980_000,
    "MEMORY_CLOCK_RATE": 2_619_000,
    "GLOBAL_MEMORY_BUS_WIDTH": 5120,
    "COOPERATIVE_LAUNCH": 1,
}
_ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
)


class FakeMachine:
    """What several fake drivers, as many processes, have in common: the allocations behind IPC handles."""

    def __init__(self) -> None:
        self.exported: dict[bytes, int] = {}
        """Handle -> address. It stays when the memory is freed, as nobody tells an importer."""


class FakeDriver:
    """Stands in for ``cuda.bindings.driver`` as a *real* driver would be used (cubins, function pointers).

    ``fail[api] = code`` makes a call fail from then on; ``log`` holds (api, arguments) of every call. It has
    ``gpus`` devices; ``links[a, b]`` holds the P2P attributes of a pair that is linked, ``enabled`` the
    (current, peer) contexts of each cuCtxEnablePeerAccess, ``uuids`` the first byte of each device's UUID.
    """

    def __init__(self, gpus: int = 1, machine: FakeMachine | None = None, **attributes: int) -> None:
        self.machine = machine or FakeMachine()
        self.opened: dict[int, int] = {}
        """Opens of each imported address that are not closed."""
        self.serials: dict[int, int] = {}
        self._serial = itertools.count(1)
        self.gpus = gpus
        self.links: dict[tuple[int, int], set[str]] = {}
        self.enabled: set[tuple[int, int]] = set()
        self.uuids = list(range(1, gpus + 1))
        self.current = 0
        self.attributes = ATTRIBUTES | attributes
        self.fail: dict[str, Any] = {}
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.memory: dict[int, Any] = {}
        self.contexts: dict[int, int] = {}
        """The context that cuPointerGetAttribute names for an address; 0 for others."""
        self.blocks_per_sm = 2
        self.maps: list[dict[str, Any]] = []
        self.version = 13000
        self.capturing: Any = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        self._encode = _ENCODE(self._encode_tiled)
        self._handles = iter(range(0x1000, 2**31, 16))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name[2].islower():
            return getattr(cuda, name)
        if not hasattr(cuda, name):
            raise AttributeError(name)
        answer = self.answers().get(name, lambda *args: ())

        def call(*args: Any) -> tuple[Any, ...]:
            self.log.append((name, args))
            if name in self.fail:
                return (self.fail[name], None)
            if name == "cuCtxEnablePeerAccess":
                self.enabled.add((self.current, args[0]))
            return (SUCCESS, *answer(*args))

        return call

    def _attribute(self, asked: Any, device: Any) -> tuple[int]:
        """Some have two names, of which CUDA 12's binding shows another than CUDA 13's."""
        del device
        members = cuda.CUdevice_attribute.__members__.items()
        names = [name.removeprefix("CU_DEVICE_ATTRIBUTE_") for name, known in members if known == asked]
        (known,) = [self.attributes[name] for name in names if name in self.attributes]
        return (known,)

    def calls(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of every call of one function."""
        return [args for api, args in self.log if api == name]

    def answers(self) -> dict[str, Callable[..., tuple[Any, ...]]]:
        """What the functions return beside success."""
        handle = lambda *args: (next(self._handles),)  # noqa: E731
        return {
            "cuDeviceGetCount": lambda: (self.gpus,),
            "cuDeviceGetUuid": self._uuid,
            "cuDeviceCanAccessPeer": lambda a, b: (int("ACCESS_SUPPORTED" in self.links.get((a, b), ())),),
            "cuDeviceGetP2PAttribute": self._link,
            "cuCtxSetCurrent": self._set_current,
            "cuDeviceGet": lambda ordinal: (ordinal,),
            "cuDeviceGetName": lambda size, device: (b"Fake H100\0\0",),
            "cuDeviceTotalMem": lambda device: (80 * 2**30,),
            "cuDeviceGetAttribute": self._attribute,
            "cuDriverGetVersion": lambda: (self.version,),
            "cuDevicePrimaryCtxRetain": handle,
            "cuStreamCreate": handle,
            "cuEventCreate": handle,
            "cuEventElapsedTime": lambda a, b: (0.25,),
            "cuModuleLoadData": handle,
            "cuModuleGetFunction": handle,
            "cuMemAlloc": self._alloc,
            "cuMemHostAlloc": lambda size, flags: self._alloc(size),
            "cuMemHostGetDevicePointer": lambda ptr, flags: (ptr + 2**40,),
            "cuMemFree": self._free,
            "cuMemGetAddressRange": self._range_of,
            "cuIpcGetMemHandle": self._export,
            "cuIpcOpenMemHandle": self._open,
            "cuIpcCloseMemHandle": self._close,
            "cuIpcGetEventHandle": lambda event: (_filled(cuda.CUipcEventHandle(), b"event"),),
            "cuIpcOpenEventHandle": handle,
            "cuMemFreeHost": self._free,
            "cuMemcpyHtoD": self._copy,
            "cuMemcpyHtoDAsync": self._copy,
            "cuMemcpyDtoH": self._copy,
            "cuMemcpyDtoHAsync": self._copy,
            "cuMemcpyDtoDAsync": self._copy,
            "cuMemcpyAsync": self._copy,
            "cuMemcpyBatchAsync": self._copy_batch,
            "cuStreamIsCapturing": lambda stream: (self.capturing,),
            "cuMemsetD8Async": lambda dst, byte, n, stream: (ctypes.memset(dst, byte, n), ())[1],
            "cuPointerGetAttribute": lambda attribute, ptr: (self.contexts.get(ptr, 0),),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda f, threads, shared: (self.blocks_per_sm,),
            "cuOccupancyMaxActiveClusters": lambda f, config: (16,),
            "cuGetProcAddress": lambda *args: (ctypes.cast(self._encode, ctypes.c_void_p).value, 0),
        }

    def _uuid(self, device: int) -> tuple[Any]:
        return (SimpleNamespace(bytes=bytes([self.uuids[device]]) * 16),)

    def _set_current(self, context: int) -> tuple[()]:
        self.current = context
        return ()

    def _link(self, attribute: Any, a: int, b: int) -> tuple[int]:
        return (int(attribute.name[len("CU_DEVICE_P2P_ATTRIBUTE_") :] in self.links.get((a, b), ())),)

    def _copy_batch(self, dsts: Any, srcs: Any, sizes: Any, count: int, *rest: Any) -> tuple[()]:
        assert len(dsts) == len(srcs) == len(sizes) == count
        for dst, src, size in zip(dsts, srcs, sizes, strict=True):
            self._copy(int(dst), int(src), size)
        return ()

    def _alloc(self, size: int) -> tuple[int]:
        buffer = (ctypes.c_uint8 * (size + 256))()
        address = -(-ctypes.addressof(buffer) // 256) * 256
        self.memory[address] = buffer
        self.serials[address] = next(self._serial)
        return (address,)

    def _range_of(self, ptr: int) -> tuple[int, int]:
        for base, buffer in self.memory.items():
            if base <= ptr < base + len(buffer) - 256:
                return base, len(buffer) - 256
        raise AssertionError(f"{ptr:#x} is not allocated")

    def _export(self, base: int) -> tuple[Any]:
        assert base in self.memory, "the base of an allocation"
        key = b"%d of %x, %d" % (self.serials[base], base, id(self))
        self.machine.exported[key.ljust(64, b"\0")] = base
        return (_filled(cuda.CUipcMemHandle(), key),)

    def _open(self, handle: Any, flags: int) -> tuple[int]:
        """Imports have the exporter's address: it is host memory."""
        assert flags == 1
        base = self.machine.exported[ctypes.string_at(handle.getPtr(), 64)]
        assert base not in self.opened, "already mapped"
        self.opened[base] = self.current
        return (base,)

    def _close(self, address: int) -> tuple[()]:
        assert self.opened.pop(address) == self.current, "another context opened it"
        return ()

    def _free(self, address: int) -> tuple[()]:
        del self.memory[address]
        return ()

    @staticmethod
    def _copy(dst: int, src: int, size: int, *stream: Any) -> tuple[()]:
        ctypes.memmove(dst, src, size)
        return ()

    def _encode_tiled(self, *args: Any) -> int:
        address, data_type, rank, base, dims, strides, box, steps, interleave, swizzle, l2, fill = args
        self.maps.append(
            {
                "address": address,
                "data_type": data_type,
                "base": base,
                "dims": dims[:rank],
                "strides": strides[: rank - 1],
                "box": box[:rank],
                "element_strides": steps[:rank],
                "rest": (interleave, swizzle, l2, fill),
            }
        )
        ctypes.memset(address, len(self.maps) % 256, 128)
        return int(self.fail.get("cuTensorMapEncodeTiled", SUCCESS))


def _filled(handle: Any, key: bytes) -> Any:
    ctypes.memmove(handle.getPtr(), key.ljust(64, b"\0"), 64)
    return handle
