"""Devices and primary contexts."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

from cuda.bindings import driver as cuda

from smfree.emulator.driver.attributes import device_attribute
from smfree.emulator.driver.base import DriverBase, Needs, as_context, entry
from smfree.emulator.driver.errors import CUresult, Refusal, error_text, invalid
from smfree.emulator.process import Context


class DeviceCalls(DriverBase):
    """cuInit, cuGetError*, cuDevice*, cuCtx*."""

    @entry(0, Needs.NOTHING)
    def cuInit(self, Flags: int) -> None:
        if int(Flags) != 0:
            raise invalid(f"Flags must be 0, got {Flags}")
        self.process.initialised = True

    @entry(1, Needs.NOTHING)
    def cuDriverGetVersion(self) -> int:
        return int(cuda.CUDA_VERSION)

    @entry(1, Needs.NOTHING)
    def cuGetErrorName(self, error: Any) -> bytes:
        return _result(error).name.encode()

    @entry(1, Needs.NOTHING)
    def cuGetErrorString(self, error: Any) -> bytes:
        return error_text(_result(error)).encode()

    # ------------------------------------------------------------------------------------------- devices

    @entry(1, Needs.INIT)
    def cuDeviceGet(self, ordinal: int) -> Any:
        return cuda.CUdevice(self._device_at(ordinal).ordinal)

    @entry(1, Needs.INIT)
    def cuDeviceGetCount(self) -> int:
        return len(self.node.devices)

    @entry(1, Needs.INIT)
    def cuDeviceGetName(self, length: int, dev: Any) -> bytes:
        return _padded(self._device_at(dev).profile.device.name, length)

    @entry(1, Needs.INIT)
    def cuDeviceGetUuid(self, dev: Any) -> Any:
        device, uuid = self._device_at(dev), cuda.CUuuid()
        digest = hashlib.sha256(f"smfree {device.profile.key} {device.ordinal}".encode()).digest()
        ctypes.memmove(uuid.getPtr(), digest, 16)
        return uuid

    @entry(1, Needs.INIT)
    def cuDeviceGetPCIBusId(self, length: int, dev: Any) -> bytes:
        return _padded(f"0000:{self._device_at(dev).ordinal + 1:02X}:00.0", length)

    @entry(1, Needs.INIT)
    def cuDeviceGetAttribute(self, attrib: Any, dev: Any) -> int:
        return device_attribute(self._device_at(dev), attrib)

    @entry(1, Needs.INIT)
    def cuDeviceTotalMem(self, dev: Any) -> int:
        return self._device_at(dev).profile.device.memory_bytes

    # ---------------------------------------------------------------------------------- primary contexts

    def _primary(self, dev: Any) -> Context:
        """This process's primary context on a device."""
        return self.process.contexts[self._device_at(dev).ordinal]

    @entry(1, Needs.INIT)
    def cuDevicePrimaryCtxRetain(self, dev: Any) -> Any:
        context = self._primary(dev)
        context.retained += 1
        return as_context(context)

    @entry(0, Needs.INIT)
    def cuDevicePrimaryCtxRelease(self, dev: Any) -> None:
        context = self._primary(dev)
        if context.retained == 0:
            raise Refusal(
                CUresult.CUDA_ERROR_INVALID_CONTEXT,
                f"the primary context of device {context.ordinal} is not retained",
            )
        context.retained -= 1
        if context.retained == 0:
            context.end()

    @entry(2, Needs.INIT)
    def cuDevicePrimaryCtxGetState(self, dev: Any) -> tuple[int, int]:
        context = self._primary(dev)
        return context.flags, int(context.active)

    @entry(0, Needs.INIT)
    def cuDevicePrimaryCtxSetFlags(self, dev: Any, flags: int) -> None:
        self._primary(dev).flags = int(flags)

    # ----------------------------------------------------------------------------------- current context

    @entry(0, Needs.INIT)
    def cuCtxSetCurrent(self, ctx: Any) -> None:
        stack = self.process.context_stack
        if ctx is None or int(ctx) == 0:
            if stack:
                stack.pop()
            return
        stack[-1:] = [self._context_of(ctx)]

    @entry(1, Needs.INIT)
    def cuCtxGetCurrent(self) -> Any:
        stack = self.process.context_stack
        return as_context(stack[-1] if stack else None)

    @entry(0, Needs.INIT)
    def cuCtxPushCurrent(self, ctx: Any) -> None:
        self.process.context_stack.append(self._context_of(ctx))

    @entry(1, Needs.INIT)
    def cuCtxPopCurrent(self) -> Any:
        stack = self.process.context_stack
        if not stack:
            raise Refusal(CUresult.CUDA_ERROR_INVALID_CONTEXT, "no context is current in this thread")
        return as_context(stack.pop())

    @entry(1)
    def cuCtxGetDevice(self) -> Any:
        return cuda.CUdevice(self._device().ordinal)

    @entry(1)
    def cuCtxGetFlags(self) -> int:
        return self._context().flags

    @entry(1, Needs.INIT)
    def cuCtxGetId(self, ctx: Any) -> int:
        context = self._context() if ctx is None or int(ctx) == 0 else self._context_of(ctx)
        return context.handle

    @entry(2)
    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int]:
        return 0, GREATEST_PRIORITY

    @entry(0)
    def cuCtxSynchronize(self) -> None:
        self._synchronize(self._context())


GREATEST_PRIORITY = -5


def _result(error: Any) -> CUresult:
    try:
        return CUresult(int(error))
    except ValueError:
        raise invalid(f"{error!r} is no CUresult") from None


def _padded(text: str, length: int) -> bytes:
    """A C string in a buffer of ``length`` bytes, cut to fit."""
    if length < 1:
        raise invalid(f"length must be at least 1, got {length}")
    return text.encode()[: length - 1].ljust(length, b"\0")
