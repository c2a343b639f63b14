"""One stream of a device as the timer sees it: marks, a blocker, a wait.

The blocker is a 32-bit wait on host-mapped memory (`cuStreamWaitValue32`): the host queues a whole batch
behind it and then lets it go, so that no launch gap of the host falls between two events. One word may hold
streams of several devices, which then start together. The wait has a host time-out, because whatever blocks
the host while the streams are held would otherwise never end.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol

import numpy as np

from smfree.cuda.errors import CudaHostError
from smfree.measure.errors import MeasureError

#: More launches than this behind a blocker risk filling the launch queue, which blocks the host while it
#: must release.
MAX_QUEUED_LAUNCHES = 32

#: The first cuda-bindings that release Python's interpreter lock in driver calls (12.9.0 holds it, 12.9.1
#: does not). With older ones a call that waits for the held stream also stops the thread that releases it.
UNLOCKED_BINDINGS = (12, 9, 1)

#: Seconds after which the host releases a held stream on its own.
RELEASE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Mark:
    """An event recorded on a stream."""

    event: Any
    stream: Any


class Queue(Protocol):
    """What the timer needs of a stream. Times in seconds."""

    @property
    def stream(self) -> Any: ...

    def mark(self) -> Mark: ...

    def elapsed_s(self, first: Mark, second: Mark) -> float: ...

    def hold(self) -> bool:
        """Keep the stream from starting later work until :meth:`release`; False when the device cannot."""
        ...

    def release(self) -> bool:
        """Let a held stream go; False when the time-out had already done so. No effect when nothing is
        held."""
        ...

    def synchronize(self) -> None: ...


class Watchdog:
    """Calls ``action`` once, either when told to or after ``timeout_s``; says which it was."""

    def __init__(self, action: Callable[[], None], timeout_s: float) -> None:
        self._action = action
        self._lock = threading.Lock()
        self._done = False
        self.timed_out = False
        self._timer = threading.Timer(timeout_s, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _expire(self) -> None:
        self._fire(late=True)

    def _fire(self, late: bool) -> None:
        with self._lock:
            if self._done:
                return
            self._done = True
            self.timed_out = late
            self._action()

    def fire(self) -> bool:
        """Run the action now unless it already ran; True when this call was in time."""
        self._timer.cancel()
        self._fire(late=False)
        return not self.timed_out


def locked_bindings(version: str) -> str:
    """Why a blocker's time-out could not work with these cuda-bindings; empty when it can."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers >= UNLOCKED_BINDINGS:
        return ""
    return (
        f"cuda-bindings {version} holds Python's interpreter lock in driver calls, so no time-out could "
        f"release the stream; install {'.'.join(map(str, UNLOCKED_BINDINGS))} or newer"
    )


class Blocker:
    """Holds streams until the host lets them go, all at once: they wait on one word of host-mapped memory.

    ``device``: any device of the machine (smfree.cuda). With unified addressing the word has one address on
    all of them, whichever allocated it (CUDA driver API, "Unified Addressing").
    """

    def __init__(self, device: Any, *, timeout_s: float = RELEASE_TIMEOUT_S) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._flag: np.ndarray | None = None
        self._buffer: Any = None
        self._flag_address = 0
        self._ticket = 0
        self._watchdog: Watchdog | None = None
        self.reason = ""
        """Why there is no blocker; empty while there is one."""

    def hold(self, *streams: Any) -> bool:
        """Keep later work of the streams from starting until :meth:`release`; False, and none is held, when
        the machine cannot."""
        if self._watchdog is not None:
            raise MeasureError("the stream is already held; release it before holding it again")
        if self.reason or not self._prepare():
            return False
        self._ticket += 1
        try:
            for stream in streams:
                stream.wait_value(self._flag_address, self._ticket)
        except CudaHostError as error:
            self.reason = str(error).splitlines()[0]
            self._let_go()  # those that wait already
            return False
        self._watchdog = Watchdog(self._let_go, self._timeout_s)
        return True

    def release(self) -> bool:
        """Let held streams go; False when the time-out had already done so. No effect when none is held."""
        watchdog, self._watchdog = self._watchdog, None
        return True if watchdog is None else watchdog.fire()

    def _let_go(self) -> None:
        assert self._flag is not None
        self._flag[0] = self._ticket

    def _prepare(self) -> bool:
        """Allocate the host-mapped word once."""
        if self._flag is not None:
            return True
        if not self._device.is_emulated:
            self.reason = locked_bindings(metadata.version("cuda-bindings"))
            if self.reason:
                return False
        try:
            self._buffer = self._device.pinned((1,), np.uint32, mapped=True)
            self._flag_address = self._buffer.device_ptr
        except CudaHostError as error:  # any refusal means: measure without a blocker, and say so
            self.reason = f"no host-mapped memory: {str(error).splitlines()[0]}"
            return False
        self._flag = self._buffer.array
        self._flag[0] = 0
        return True


class DeviceQueue:
    """A :class:`Queue` over a stream of ``smfree.cuda``.

    ``device``: an open smfree.cuda Device. ``stream``: the stream every timed launch goes to.
    """

    def __init__(self, device: Any, stream: Any, *, timeout_s: float = RELEASE_TIMEOUT_S) -> None:
        self._stream = stream
        self._blocker = Blocker(device, timeout_s=timeout_s)

    @property
    def stream(self) -> Any:
        return self._stream

    @property
    def blocker_reason(self) -> str:
        """Why there is no blocker; empty while there is one."""
        return self._blocker.reason

    def mark(self) -> Mark:
        return Mark(self._stream.record(), self._stream)

    def elapsed_s(self, first: Mark, second: Mark) -> float:
        if first.stream is not second.stream:
            raise MeasureError(
                "both events of a time must lie on the stream that runs the timed work "
                f"(got {first.stream!r} and {second.stream!r}); launch on the timer's stream"
            )
        return float(second.event.elapsed_us(first.event)) * 1e-6

    def hold(self) -> bool:
        return self._blocker.hold(self._stream)

    def release(self) -> bool:
        return self._blocker.release()

    def synchronize(self) -> None:
        self._stream.synchronize()
