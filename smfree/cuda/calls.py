"""Driver calls, each one checked.

A :class:`Calls` is the only way in which smfree.cuda talks to a driver. It makes the device's context
current, checks the returned code, and turns a failure into an exception that tells three situations apart:
the driver refused these arguments, a kernel failed, or the context had failed before.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from smfree.cuda.errors import (
    ContextFailedError,
    DeviceClosedError,
    DeviceLostError,
    DriverError,
    KernelFaultError,
    UnavailableError,
)

_FAULTS = frozenset(
    (
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_CONTAINED",
    )
)
_LOST = frozenset(
    (
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_DEVICE_UNAVAILABLE",
        "CUDA_ERROR_SYSTEM_NOT_READY",
        "CUDA_ERROR_NO_DEVICE",
        "CUDA_ERROR_DEINITIALIZED",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "CUDA_ERROR_MPS_RPC_FAILURE",
    )
)
_REMEDIES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free device arrays or ask for less",
    "CUDA_ERROR_NOT_INITIALIZED": "this process was forked after CUDA was initialised: start processes with "
    "the method spawn (smfree.ranks.spawn)",
    "CUDA_ERROR_INVALID_VALUE": "an argument is outside what the driver accepts",
    "CUDA_ERROR_INVALID_CONTEXT": "the device was closed, or its context belongs to another thread's work",
    "CUDA_ERROR_INVALID_HANDLE": "the object was freed, or belongs to another device",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "compile for this device's architecture",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "use fewer threads, registers or bytes of shared memory per CTA",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": "all CTAs of a cooperative launch must be "
    "resident: use a smaller grid",
    "CUDA_ERROR_INVALID_CLUSTER_SIZE": "use a smaller cluster that divides the "
    "grid: 8 CTAs are portable, up to 16 depend on the GPU",
    "CUDA_ERROR_NOT_SUPPORTED": "this device or driver cannot do it: ask device.capabilities first",
    "CUDA_ERROR_NOT_PERMITTED": "the operation is not allowed here (profiling rights, or a capturing stream)",
}


class _Holds(threading.local):
    """How many reasons this thread has not to free anything now: stream captures that it has begun, in which
    the driver forbids it, and collectives that it queues (:func:`put_off_clean_up`)."""

    count = 0


_holds = _Holds()


class Calls:
    """One driver and one context.

    ``driver`` is the module ``cuda.bindings.driver`` or an object with the same functions; ``emulated``
    tells that it has a ``report()``. ``failed`` is the first error that took the context down, None while
    it lives.
    """

    def __init__(self, driver: Any, *, spec: str, emulated: bool) -> None:
        self.driver = driver
        self.spec = spec
        self.emulated = emulated
        self.context: Any = None
        self.failed: DriverError | None = None
        self.closed = False
        self._pid = os.getpid()
        self._depth = 0
        self._put_off: list[tuple[str, tuple[Any, ...]]] = []

    def __call__(self, api: str, *args: Any, **what: object) -> Any:
        """Call ``api`` and return its values: none, one, or a tuple. ``what`` names the arguments that
        matter."""
        if self.closed:
            raise DeviceClosedError(f"{api} after the device {self.spec} was closed; open it again")
        if self.failed is not None:
            raise self._already_failed(api)
        if os.getpid() != self._pid:
            raise DeviceClosedError(
                f"{api}: the device {self.spec} was opened in process {self._pid}, from which this one "
                f"({os.getpid()}) was forked; CUDA does not survive that: start processes with the method "
                "spawn (smfree.ranks.spawn) and open devices in them"
            )
        self._depth += 1
        try:
            if self.context is not None:
                self.driver.cuCtxSetCurrent(self.context)
            returned = getattr(self.driver, api)(*args)
        except RuntimeError as error:
            if "not found" in str(error) and api in str(error):  # what the binding says then
                raise UnavailableError(
                    f"{api}: the driver of {self.spec} is older than the binding and has no such function "
                    f"({error}); update the driver, or install cuda-bindings of its version"
                ) from error
            raise
        finally:
            self._depth -= 1
        self._catch_up()
        return self.check(api, returned, **what)

    def check(self, api: str, returned: Any, **what: object) -> Any:
        """Check what a driver function returned (``(CUresult, ...)``) and give its values."""
        code, *values = returned if isinstance(returned, tuple) else (returned,)
        if int(code) != 0:
            raise self._error(api, int(code), getattr(code, "name", "unknown code"), what)
        return None if not values else values[0] if len(values) == 1 else tuple(values)

    def is_ready(self, api: str, *args: Any) -> bool:
        """For queries: True on CUDA_SUCCESS, False on CUDA_ERROR_NOT_READY, an exception on anything else."""
        try:
            self(api, *args)
        except DriverError as error:
            if error.code_name == "CUDA_ERROR_NOT_READY":
                return False
            raise
        return True

    def quiet(self, api: str, *args: Any) -> None:
        """For clean-up: call ``api`` unless the context is gone, and let no error out.

        Garbage collection can strike inside a call (an emulated GPU is Python too), a stream capture or
        :func:`put_off_clean_up`; then it is done after it.
        """
        if self._depth or _holds.count:
            self._put_off.append((api, args))
            return
        if self.failed is None and not self.closed and os.getpid() == self._pid:
            with contextlib.suppress(Exception):
                if self.context is not None:
                    self.driver.cuCtxSetCurrent(self.context)
                getattr(self.driver, api)(*args)

    def _catch_up(self) -> None:
        """Do the clean-up that was put off, in its order."""
        while self._put_off and not self._depth and not _holds.count:
            api, args = self._put_off.pop(0)
            self.quiet(api, *args)

    def hold_clean_up(self) -> None:
        """A stream capture of this thread begins."""
        _holds.count += 1

    def resume_clean_up(self) -> None:
        """It has ended."""
        _holds.count -= 1
        self._catch_up()

    def close(self) -> None:
        """From now on every call is an error and every clean-up a no-op."""
        self.closed = True

    @property
    def _restart(self) -> str:
        return "open the device again" if self.emulated else "start a new process"

    def _emulator_gave_up(self) -> bool:
        """Whether an emulated context ended with a kernel that needs what is not modelled."""
        return self.emulated and self.context is not None and self.driver.context_failed(self.context)

    def _report(self) -> str:
        return str(self.driver.report() or "") if self.emulated else ""

    def _error(self, api: str, code: int, name: str, what: dict[str, object]) -> DriverError:
        only_fabric = name == "CUDA_ERROR_SYSTEM_NOT_READY" and api.startswith("cuMulticast")
        if name in _LOST and not only_fabric:
            remedy = f"the device {self.spec} is lost"
            if not self.emulated:  # whose report says the rest
                remedy += ": look at dmesg and nvidia-smi, then start a new process"
            self.failed = DeviceLostError(
                api, code, name, arguments=what, remedy=remedy, report=self._report()
            )
            return self.failed
        if name in _FAULTS or self._emulator_gave_up():
            remedy = (
                "a kernel launched earlier failed and its context is unusable; "
                f"{api}'s own arguments were not refused. {self._restart.capitalize()}"
            )
            if not self.emulated:
                remedy += "; compute-sanitizer, or the same run with --device emu:h100, names the access"
            self.failed = KernelFaultError(
                api, code, name, arguments=what, remedy=remedy, report=self._report()
            )
            return self.failed
        report = self._report()  # the emulator knows better than the code's general remedy
        remedy = "" if report else _REMEDIES.get(name, "")
        return DriverError(api, code, name, arguments=what, remedy=remedy, report=report)

    def _already_failed(self, api: str) -> ContextFailedError:
        first = self.failed
        assert first is not None
        return ContextFailedError(
            api,
            first.code,
            first.code_name,
            text=f"{api} was not called: the context of {self.spec} had already failed. First failure: "
            f"{first.api} returned {first.code_name} ({first.code}); {self._restart}",
        )


@contextlib.contextmanager
def put_off_clean_up(devices: Sequence[Calls]) -> Iterator[None]:
    """What Python happens to free in this thread meanwhile is freed afterwards.

    For queueing kernels that wait for each other on several devices: cuMemFree may wait for the device (CUDA
    driver API), so for a kernel whose partner would then never be launched.
    """
    _holds.count += 1
    try:
        yield
    finally:
        _holds.count -= 1
        for device in devices:
            device._catch_up()


class PrimaryContext:
    """A retained primary context, released when its last user is gone."""

    def __init__(self, calls: Calls, device: Any) -> None:
        self.handle = calls("cuDevicePrimaryCtxRetain", device)
        self._release = weakref.finalize(self, _release_context, calls.driver, device)


def _release_context(driver: Any, device: Any) -> None:
    driver.cuDevicePrimaryCtxRelease(device)
