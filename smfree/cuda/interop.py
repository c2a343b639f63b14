"""Memory of other libraries, without a copy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.cuda.errors import ArrayError
from smfree.cuda.memory import Allocation, DeviceArray

if TYPE_CHECKING:
    from smfree.cuda.device import Device


def wrap(device: Device, thing: Any) -> DeviceArray:
    """See :meth:`smfree.cuda.device.Device.wrap`."""
    if isinstance(thing, DeviceArray):
        if thing.device is not device:
            raise ArrayError(f"{thing!r} belongs to another device than {device.spec}; copy it there first")
        return thing
    interface = _interface(thing)
    shape: tuple[int, ...] = tuple(int(n) for n in interface["shape"])
    dtype = np.dtype(interface["typestr"])
    ptr, read_only = interface["data"]
    if read_only:
        raise ArrayError("the array is read-only (its __cuda_array_interface__ says so); pass a writable one")
    strides = interface.get("strides")
    if strides is not None and 0 not in shape and tuple(strides) != _dense(shape, dtype.itemsize):
        raise ArrayError(
            f"the array is strided (shape {shape}, strides {tuple(strides)} bytes); make it contiguous"
        )
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes:
        _check_owner(device, int(ptr), nbytes)
    return DeviceArray(device, Allocation(device.calls, int(ptr), nbytes, owner=thing), 0, shape, dtype)


def _interface(thing: Any) -> dict[str, Any]:
    try:
        interface = getattr(thing, "__cuda_array_interface__", None)
    except (AttributeError, TypeError, RuntimeError) as error:
        raise ArrayError(
            f"{type(thing).__name__} does not show its device memory ({error}); pass a dense "
            "tensor without gradients of a type that numpy has (bfloat16: tensor.view(torch.int16))"
        ) from error
    if interface is not None:
        return interface
    if isinstance(thing, np.ndarray) or not hasattr(thing, "__dlpack__"):
        raise ArrayError(
            f"{type(thing).__name__} is not in device memory (no __cuda_array_interface__, no DLPack); "
            "copy it there with device.asarray"
        )
    kind, _ = thing.__dlpack_device__()
    if int(kind) != 2:  # kDLCUDA
        raise ArrayError(
            f"the DLPack array lives on device type {int(kind)}, not CUDA (2); use device.asarray"
        )
    try:
        import torch
    except ImportError as error:
        raise ArrayError("taking a DLPack array needs torch; install the extra torch") from error
    return torch.from_dlpack(thing).__cuda_array_interface__


def _dense(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) * itemsize for i in range(len(shape)))


def _check_owner(device: Device, ptr: int, nbytes: int) -> None:
    if device.is_emulated:
        if not device.owns(ptr, nbytes):
            raise ArrayError(
                f"{nbytes} bytes at {ptr:#x} are not memory of {device.spec}; copy with device.asarray"
            )
        return
    # DEVICE_ORDINAL would say it outright, but some versions of the binding answer 0 for every device
    # (NVIDIA/cuda-python#2752). Virtual and stream-ordered memory has no context (UCX: cuda_copy_md.c).
    attribute = device.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT
    context = int(device.calls("cuPointerGetAttribute", attribute, ptr, ptr=hex(ptr)))
    if context not in (0, int(device.calls.context)):
        raise ArrayError(
            f"the array at {ptr:#x} lives in another context than that of {device.spec}, probably on another "
            "GPU; copy it to this device first"
        )
