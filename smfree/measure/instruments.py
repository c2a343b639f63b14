"""Per-device instruments: stream and queue, empty-launch floor, SM clock probe, L2 flush."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from smfree.measure.clocks import clock_ratio_mhz
from smfree.measure.queue import DeviceQueue
from smfree.measure.timer import DeviceTimer, Floor

PROBE_SOURCE = Path(__file__).with_name("probe.cu")

#: The L2 is emptied by reading this many times its size.
FLUSH_FACTOR = 2

#: One word of every line (128 bytes) replaces the line; a real L2 fetches 32-byte sectors, so there each is
#: read.
_LINE_BYTES = 128
_SECTOR_BYTES = 32
_SWEEP_THREADS = 256
_PROBE_SPIN_NS = 30_000


class Instruments:
    """What measuring on one device needs; made on first use, shared by all points of a session."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.stream = device.stream()
        self.queue = DeviceQueue(device, self.stream)

    @cached_property
    def _probe(self) -> Any:
        from smfree.cuda.compile_cuda import CudaSource

        return self.device.compile(CudaSource(PROBE_SOURCE))

    def prepare(self) -> None:
        """Compile and load the probes and allocate what they use: behind a blocker all of that could wait
        for it."""
        for name in ("empty_kernel", "clock_probe", "read_sweep"):
            self._probe.kernel(name)
        self._flush_buffer  # noqa: B018  made now

    @cached_property
    def floor(self) -> Floor:
        """Seconds of an empty launch inside a batch."""
        kernel = self._probe.kernel("empty_kernel")
        timer = DeviceTimer(self.queue)
        launches = 8
        for _ in range(2):  # the first batch warms the path up
            sample = timer.batch(
                lambda _, stream: kernel.launch((1,), (32,), [], stream=stream), launches, count=False
            )
        return Floor(sample.seconds)

    @cached_property
    def _clock_buffer(self) -> Any:
        return self.device.empty((2,), np.uint64)

    def sm_clock_mhz(self) -> float | None:
        """SM clock right now: cycles against nanoseconds over a short spin."""
        kernel = self._probe.kernel("clock_probe")
        kernel.launch((1,), (1,), [self._clock_buffer, np.uint64(_PROBE_SPIN_NS)], stream=self.stream)
        self.stream.synchronize()
        cycles, nanoseconds = (float(value) for value in self._clock_buffer.numpy())
        return clock_ratio_mhz(cycles, nanoseconds)

    @cached_property
    def _flush_buffer(self) -> Any:
        words = FLUSH_FACTOR * self.device.capabilities.l2_bytes // 4
        buffer = self.device.empty((words,), np.uint32)
        buffer.fill(0)
        return buffer

    def flush_l2(self, stream: Any | None = None) -> None:
        """Replace what the L2 holds by clean lines of a buffer twice its size; queued, not waited for."""
        self.read(self._flush_buffer, stream)

    def read(self, array: Any, stream: Any | None = None) -> None:
        """Read every line of ``array`` once, so that the L2 holds as much of it as fits; queued, not waited
        for."""
        step = _LINE_BYTES if self.device.is_emulated else _SECTOR_BYTES
        blocks = min(-(-array.nbytes // (step * _SWEEP_THREADS)), 64 * self.device.capabilities.num_sms)
        self._probe.kernel("read_sweep").launch(
            (blocks,),
            (_SWEEP_THREADS,),
            [array, np.uint64(array.nbytes), np.uint32(step), np.uint64(0)],
            stream=stream or self.stream,
        )
