"""Traces of what an emulated GPU does and when."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from smfree.cuda.errors import TraceError

if TYPE_CHECKING:
    from smfree.cuda.device import Device


@contextmanager
def traced(device: Device, ctas: Collection[int]) -> Iterator[Any]:
    """See :meth:`smfree.cuda.device.Device.trace`."""
    if not device.is_emulated:
        raise TraceError(
            f"only emulated GPUs record a trace (this is {device.spec}); use 'emu:h100', or a profiler here"
        )
    if not device.has_clock:
        raise TraceError(
            f"a trace needs a clock, which the schedule '{device.driver.node.schedule}' has not; open the "
            "device with schedule='timed'"
        )
    from smfree.emulator.trace import Trace

    device.synchronize()
    before = device.emulator.trace
    trace = Trace(ctas)
    try:
        device.emulator.trace = trace
    except NotImplementedError as error:
        raise TraceError(str(error)) from None
    try:
        yield trace
        device.synchronize()
    finally:
        device.emulator.trace = before
