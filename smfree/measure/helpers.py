"""More processes for points on emulated devices.

An emulated point is deterministic and costs only processor time, so forked helpers take points from the end
of the list while the session itself takes them from the front; who claims a point first runs it. The session
then reports all of them in order, as if it had run them. A helper that fails at a point hands back nothing,
and the session runs it again. Never used on a real GPU, where two processes would disturb each other.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_POLL_S = 0.002


def cores() -> int:
    """Processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share(jobs: int, run: Callable[[int], Any], total: int) -> list[Any]:
    """``[run(0), ..., run(total - 1)]``, computed by up to ``jobs`` processes; results are picklable."""
    helpers = Helpers(total, jobs - 1)
    helpers.start(lambda number: (run(number),))
    try:
        return [run(n) if (done := helpers.result(n)) is None else done[0] for n in range(total)]
    finally:
        helpers.close()


class Helpers:
    """``count`` helper processes for ``total`` numbered jobs. Needs ``os.fork``; with count 0 it does
    nothing."""

    def __init__(self, total: int, count: int) -> None:
        self._total = total
        self._count = count if hasattr(os, "fork") and total else 0
        self.started = 0
        self._children: list[int] = []
        if self._count:
            self._claims = mmap.mmap(-1, total)  # shared; 0 = free, 1 = the session's, 2 = a helper's
            self._lock = multiprocessing.get_context("fork").Lock()
            self._folder = Path(tempfile.mkdtemp(prefix="smfree-"))
            self._session = os.getpid()

    def start(self, run: Callable[[int], Any]) -> None:
        """Fork the helpers. ``run(number)`` gives a picklable result, None when it has none."""
        for _ in range(self._count):
            child = os.fork()
            if child == 0:
                self._work(run)
            self._children.append(child)
            self.started += 1

    def _work(self, run: Callable[[int], Any]) -> None:
        """The helper's life; never returns. What it prints is dropped: failures are run again by the
        session."""
        try:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for standard in (0, 1, 2):
                os.dup2(nowhere, standard)
            for number in reversed(range(self._total)):
                if os.getppid() != self._session:  # it was killed: nobody waits for results
                    shutil.rmtree(self._folder, ignore_errors=True)
                    break
                if self._claim(number, 2):
                    self._put(number, run(number))
        finally:
            os._exit(0)

    def _put(self, number: int, result: Any) -> None:
        part = self._folder / f"{number}.part"
        part.write_bytes(pickle.dumps(result))
        part.rename(self._folder / f"{number}.done")

    def _claim(self, number: int, who: int) -> bool:
        with self._lock:
            if self._claims[number]:
                return False
            self._claims[number] = who
            return True

    def result(self, number: int) -> Any:
        """A helper's result of a job, waited for when one is at it; None when the session has to run it."""
        if not self.started or self._claim(number, 1):
            return None
        if self._claims[number] == 1:
            return None
        done = self._folder / f"{number}.done"
        while not done.exists():
            if not self._alive() and not done.exists():
                return None
            time.sleep(_POLL_S)
        return pickle.loads(done.read_bytes())

    def _alive(self) -> bool:
        for child in list(self._children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(child, os.WNOHANG) == (0, 0):
                    continue
            self._children.remove(child)
        return bool(self._children)

    def close(self) -> None:
        """End the helpers and remove their files."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
        self._children.clear()
        if self._count:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._count = 0
