"""The lock of a node: whoever steps the node for long lets the others in between."""

from __future__ import annotations

import threading
from types import TracebackType

GIVE_WAY_S = 0.05
"""How long the holder stands aside at most when nobody comes."""


class Turns:
    """A re-entrant lock, a condition (:meth:`wait`, :meth:`notify_all`), and turns (:meth:`give_way`).

    Python's locks are not fair: a thread that releases one and takes it again at once wins. So the holder
    asks whether somebody waits, and waits itself until that one has been in.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._been_in = threading.Condition(self._lock)
        self._count = threading.Lock()
        self._asking = 0
        self._aside = 0

    def __enter__(self) -> Turns:
        if not self._lock.acquire(blocking=False):
            with self._count:
                self._asking += 1
            self._lock.acquire()
            with self._count:
                self._asking -= 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._aside:
            self._been_in.notify_all()
        self._lock.release()

    @property
    def asked_for(self) -> bool:
        """Whether another thread waits to get in."""
        return self._asking > 0

    def give_way(self) -> None:
        """Let a thread that waits to get in have its turn; the caller holds the lock."""
        if self._asking:
            self._aside += 1
            self._been_in.wait(GIVE_WAY_S)
            self._aside -= 1

    def wait(self, timeout_s: float) -> bool:
        """Let go until :meth:`notify_all` or for ``timeout_s``; False when the time was up."""
        return self._changed.wait(timeout_s)

    def notify_all(self) -> None:
        """Something changed that threads in :meth:`wait` may want to know."""
        self._changed.notify_all()
