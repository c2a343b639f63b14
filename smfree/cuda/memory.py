"""Device arrays and host buffers.

Memory is freed when the last array, view or queued operation that uses it is gone, at once by ``free()``,
or when the device is closed; afterwards every use is a DeviceClosedError, never a stray pointer.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from smfree.cuda.errors import ArrayError, DeviceClosedError

if TYPE_CHECKING:
    from smfree.cuda.calls import Calls
    from smfree.cuda.device import Device
    from smfree.cuda.streams import Stream


def as_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple of Python integers; a number is one dimension. Raises ArrayError."""
    try:
        dims = tuple(index(n) for n in shape) if isinstance(shape, Iterable) else (index(shape),)
    except TypeError:
        raise ArrayError(f"a shape is a whole number or a sequence of them (got {shape!r})") from None
    if any(n < 0 for n in dims):
        raise ArrayError(f"a shape has no negative dimension (got {dims})")
    return dims


def as_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """A numpy dtype whose elements are bytes alone, at least one. Raises ArrayError."""
    try:
        wanted = np.dtype(dtype)
    except TypeError as error:
        raise ArrayError(f"{error}; use a numpy dtype such as np.float32") from None
    if wanted.hasobject or wanted.itemsize == 0:
        raise ArrayError(f"device arrays hold numbers or plain structures (got dtype {wanted})")
    return wanted


class Allocation:
    """A range of device memory and who frees it. ``owner`` is kept alive as long; ``release(calls, ptr)``
    frees (default: cuMemFree, and nothing for memory that an ``owner`` frees)."""

    def __init__(
        self,
        calls: Calls,
        ptr: int,
        nbytes: int,
        *,
        owner: Any = None,
        release: Callable[[Calls, int], None] | None = None,
    ) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self.owner = owner
        default = _free_device if owner is None else _free_nothing
        self._free = weakref.finalize(self, release or default, calls, ptr)

    @property
    def freed(self) -> bool:
        """True once the memory is gone."""
        return not self._free.alive

    def free(self) -> None:
        """Free now; a second call does nothing."""
        self._free()
        self.owner = None

    def leave(self) -> None:
        """Never free it: other processes may use it still. It goes with the context."""
        self._free.detach()


def _free_device(calls: Calls, ptr: int) -> None:
    calls.quiet("cuMemFree", ptr)


def _free_nothing(calls: Calls, ptr: int) -> None:
    del calls, ptr


class DeviceArray:
    """A dense, C-ordered array in device memory.

    Slicing along dimension 0 (step 1) and :meth:`bytes_view` give views that share the memory. A view may
    start at any byte, so that kernels can be shown a misaligned pointer; it is theirs to refuse it.
    """

    def __init__(
        self, device: Device, allocation: Allocation, offset: int, shape: tuple[int, ...], dtype: DTypeLike
    ) -> None:
        self.device = device
        self.allocation = allocation
        self.shape = shape
        self.dtype: np.dtype = np.dtype(dtype)
        self._offset = offset

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def ptr(self) -> int:
        """Device address of the first byte. Raises DeviceClosedError once the memory was freed."""
        if self.allocation.freed:
            raise DeviceClosedError(
                f"the device array {self!r} was freed, or its device {self.device.spec} closed; "
                "allocate a new one"
            )
        return self.allocation.ptr + self._offset

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.ptr, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a device array of rank 0 has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device.spec!r})"

    def __getitem__(self, rows: slice) -> DeviceArray:
        """A view of rows ``start:stop``. Raises ArrayError for anything but a slice with step 1."""
        if not isinstance(rows, slice) or rows.step not in (None, 1) or not self.shape:
            raise ArrayError(f"a device array is sliced along dimension 0 with step 1 (got {rows!r})")
        start, stop, _ = rows.indices(self.shape[0])
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        offset = self._offset + start * row_bytes
        shape = (max(stop - start, 0), *self.shape[1:])
        return DeviceArray(self.device, self.allocation, offset, shape, self.dtype)

    def bytes_view(self, offset_bytes: int = 0, nbytes: int | None = None) -> DeviceArray:
        """A uint8 view of ``nbytes`` from ``offset_bytes`` on (default: to the end)."""
        try:
            offset_bytes = index(offset_bytes)
            nbytes = self.nbytes - offset_bytes if nbytes is None else index(nbytes)
        except TypeError:
            raise ArrayError(
                f"a byte view takes whole numbers of bytes (got {offset_bytes!r} and {nbytes!r}); round them"
            ) from None
        if offset_bytes < 0 or nbytes < 0 or offset_bytes + nbytes > self.nbytes:
            raise ArrayError(f"bytes {offset_bytes} to {offset_bytes + nbytes} lie outside {self!r}")
        return DeviceArray(self.device, self.allocation, self._offset + offset_bytes, (nbytes,), np.uint8)

    def view(self, dtype: DTypeLike, shape: tuple[int, ...] | None = None) -> DeviceArray:
        """The same bytes as another dtype and shape (default: one dimension). Sizes must agree."""
        wanted = as_dtype(dtype)
        shape = (self.nbytes // wanted.itemsize,) if shape is None else as_shape(shape)
        if math.prod(shape) * wanted.itemsize != self.nbytes:
            raise ArrayError(f"{self!r} has {self.nbytes} bytes; {shape} of {wanted} needs another number")
        return DeviceArray(self.device, self.allocation, self._offset, shape, wanted)

    def numpy(self, *, stream: Stream | None = None) -> NDArray[Any]:
        """Copy to the host, after everything queued on ``stream`` (default: the default stream, which waits
        for every stream that smfree made)."""
        result = np.empty(self.shape, self.dtype)
        if self.nbytes:
            call = self.device.calls
            what = {"bytes": self.nbytes, "src": hex(self.ptr)}
            if stream is None:
                call("cuMemcpyDtoH", result.ctypes.data, self.ptr, self.nbytes, **what)
                self.device.default_stream.settled()
            else:
                handle = self._stream(stream).handle
                call("cuMemcpyDtoHAsync", result.ctypes.data, self.ptr, self.nbytes, handle, **what)
                stream.synchronize()
        return result

    def copy_from(self, source: NDArray[Any] | HostBuffer, *, stream: Stream | None = None) -> DeviceArray:
        """Copy host data of the same shape and dtype here; asynchronous when ``stream`` is given. Returns
        self."""
        array = source.array if isinstance(source, HostBuffer) else np.asarray(source)
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ArrayError(
                f"host data {array.shape} {array.dtype} does not fit {self!r}; give it the same "
                "shape and dtype"
            )
        array = np.ascontiguousarray(array)
        if self.nbytes:
            what = {"bytes": self.nbytes, "dst": hex(self.ptr)}
            if stream is None:
                self.device.calls("cuMemcpyHtoD", self.ptr, array.ctypes.data, self.nbytes, **what)
                # From pageable memory it returns once the bytes are staged (CUDA driver API, "API
                # synchronization behavior"); a non-blocking stream would not wait for them to arrive.
                self.device.default_stream.synchronize()
            else:
                handle = self._stream(stream).handle
                self.device.calls(
                    "cuMemcpyHtoDAsync", self.ptr, array.ctypes.data, self.nbytes, handle, **what
                )
                stream.keep(array, source, self.allocation)
        return self

    def copy_from_device(self, source: DeviceArray, *, stream: Stream | None = None) -> DeviceArray:
        """Copy from another array of this device with the driver's own copy (cuMemcpyDtoDAsync). Returns
        self."""
        if not isinstance(source, DeviceArray) or source.device is not self.device:
            raise ArrayError(
                f"copy_from_device copies an array of the same device (got {source!r}); use "
                "copy_from for host data"
            )
        if self.nbytes and self.ptr < source.ptr + source.nbytes and source.ptr < self.ptr + self.nbytes:
            raise ArrayError(
                f"source and destination must not overlap (got {source.nbytes} bytes at {source.ptr:#x} and "
                f"{self.ptr:#x}); copy through a third array"
            )
        if source.nbytes != self.nbytes:
            raise ArrayError(
                f"{source!r} has {source.nbytes} bytes, {self!r} has {self.nbytes}; sizes must agree"
            )
        if self.nbytes:
            used = self._stream(stream)
            what = {"dst": hex(self.ptr), "src": hex(source.ptr), "bytes": self.nbytes}
            self.device.calls("cuMemcpyDtoDAsync", self.ptr, source.ptr, self.nbytes, used.handle, **what)
            used.keep(source.allocation, self.allocation)
        return self

    def fill(self, byte: int, *, stream: Stream | None = None) -> DeviceArray:
        """Set every byte (0 to 255), asynchronously on ``stream``. Returns self."""
        if not isinstance(byte, SupportsIndex) or not 0 <= index(byte) <= 255:
            raise ArrayError(f"a fill byte is a whole number from 0 to 255 (got {byte!r})")
        byte = index(byte)
        if self.nbytes:
            used = self._stream(stream)
            what = {"dst": hex(self.ptr), "bytes": self.nbytes}
            self.device.calls("cuMemsetD8Async", self.ptr, byte, self.nbytes, used.handle, **what)
            used.keep(self.allocation)
        return self

    def _stream(self, stream: Stream | None) -> Stream:
        used = stream or self.device.default_stream
        if used.device is not self.device:
            raise ArrayError(
                f"the stream belongs to another device ({used.device.spec}) than {self!r}; use one of "
                "array.device"
            )
        return used

    def free(self) -> None:
        """Free the memory now, for all views of it too."""
        self.allocation.free()


class HostBuffer:
    """Host memory as a numpy array: ``pinned`` (page-locked) or pageable.

    ``device_ptr`` is the address a kernel uses when the buffer is ``mapped``. Pinned memory stays valid as
    long as a numpy view of it lives, even after its device was closed.
    """

    def __init__(
        self, device: Device, array: NDArray[Any], *, pinned: bool, device_ptr: int | None = None
    ) -> None:
        self.device = device
        self.array = array
        self.pinned = pinned
        self._device_ptr = device_ptr

    @property
    def ptr(self) -> int:
        """Host address of the first byte."""
        return int(self.array.ctypes.data)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.array.nbytes)

    @property
    def mapped(self) -> bool:
        """Whether kernels can use the memory."""
        return self._device_ptr is not None

    @property
    def device_ptr(self) -> int:
        """Device address. Raises ArrayError when the buffer was not allocated with ``mapped=True``."""
        if self._device_ptr is None:
            raise ArrayError(
                "this host buffer is not mapped into the device; use device.pinned(..., mapped=True)"
            )
        return self._device_ptr


def pinned_array(
    calls: Calls, context: object, shape: tuple[int, ...], dtype: DTypeLike, flags: int
) -> NDArray[Any]:
    """A numpy array in page-locked memory, which is freed with the last view of it; ``context`` lives as
    long."""
    wanted = as_dtype(dtype)
    nbytes = math.prod(shape) * wanted.itemsize
    ptr = int(calls("cuMemHostAlloc", max(nbytes, 1), flags, bytes=nbytes))
    memory: Any = (ctypes.c_uint8 * max(nbytes, 1)).from_address(ptr)
    weakref.finalize(memory, _free_host, calls, context, ptr)
    return np.frombuffer(memory, np.uint8, nbytes).view(wanted).reshape(shape)


def _free_host(calls: Calls, context: object, ptr: int) -> None:
    del context
    calls.quiet("cuMemFreeHost", ptr)
