"""A stream with a fake clock: the host queues, the device runs, both in seconds that the test chooses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from smfree.measure.errors import MeasureError
from smfree.measure.queue import Mark


@dataclass
class FakeStream:
    name: str


@dataclass
class FakeQueue:
    """Host-side submission costs ``submit_s``; the device runs in order, not before it was told to.

    ``can_hold``: whether the device has a blocker. ``late``: the time-out lets the stream go before the
    host does.
    """

    submit_s: float = 5e-6
    can_hold: bool = True
    late: bool = False
    stream: Any = field(default_factory=lambda: FakeStream("timed"))
    host_s: float = 0.0
    device_s: float = 0.0
    syncs: int = 0
    _held: bool = False
    _pending: list[tuple[str, float, Any]] = field(default_factory=list)

    def submit(self, seconds: float, stream: Any = None) -> None:
        """Queue device work of ``seconds``; on another stream it never shows on this one."""
        self.host_s += self.submit_s
        if stream is None or stream is self.stream:
            self._put(("work", seconds, None))

    def mark(self) -> Mark:
        event = {"at": None}
        self._put(("mark", 0.0, event))
        return Mark(event, self.stream)

    def elapsed_s(self, first: Mark, second: Mark) -> float:
        if first.stream is not second.stream:
            raise MeasureError("both events of a time must lie on the stream that runs the timed work")
        return second.event["at"] - first.event["at"]

    def hold(self) -> bool:
        self._held = self.can_hold
        return self.can_hold

    def release(self) -> bool:
        self._held = False
        if self._pending:
            self.device_s = max(self.device_s, self.host_s)
        for item in self._pending:
            self._run(item)
        self._pending.clear()
        return not self.late

    def synchronize(self) -> None:
        self.syncs += 1
        self.host_s = max(self.host_s, self.device_s)

    def _put(self, item: tuple[str, float, Any]) -> None:
        if self._held:
            self._pending.append(item)
        else:
            if item[0] == "work":
                self.device_s = max(self.device_s, self.host_s)
            self._run(item)

    def _run(self, item: tuple[str, float, Any]) -> None:
        kind, seconds, event = item
        if kind == "mark":
            event["at"] = self.device_s
        else:
            self.device_s += seconds
