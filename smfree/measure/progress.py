"""A line that says what runs now, on a terminal only; elsewhere pytest's own dots and percentages stay."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Rewrites one line of ``stream``: done / total, the current point, time left."""

    def __init__(self, total: int, stream: TextIO | None = None, *, width: int = 78) -> None:
        self._stream = stream if stream is not None else sys.__stderr__
        self._width = width
        self._total = total
        self._done = 0
        self._start = time.perf_counter()
        self.enabled = bool(self._stream is not None and self._stream.isatty() and total)

    def begin(self, name: str) -> None:
        """Show ``name`` as the current point."""
        if self.enabled:
            self._show(f"[{self._done + 1}/{self._total}{self._left()}] {name}")

    def finish(self) -> None:
        """Count the current point as done; clears the line after the last one."""
        self._done += 1
        if self.enabled and self._done >= self._total:
            self.clear()

    def clear(self) -> None:
        if self.enabled and self._stream is not None:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()

    def _left(self) -> str:
        if self._done < 5:
            return ""
        spent = time.perf_counter() - self._start
        return f", about {spent / self._done * (self._total - self._done):.0f} s left"

    def _show(self, text: str) -> None:
        assert self._stream is not None
        self._stream.write("\r\x1b[2K" + text[: self._width])
        self._stream.flush()
