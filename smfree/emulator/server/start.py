"""Starting a node's server as a child process that never outlives its parent."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import weakref
from pathlib import Path
from types import TracebackType

from smfree.emulator.exec.schedule import SCHEDULES
from smfree.emulator.node import Strict

_START_TIMEOUT_S = 60.0


class NodeProcess:
    """A running server. ``address`` is what its clients put into ``SMFREE_NODE``; a context manager."""

    def __init__(self, child: subprocess.Popen[bytes], address: str) -> None:
        self._child = child
        self.address = address
        self._end = weakref.finalize(self, _stop, child)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the server still runs."""
        return self._child.poll() is None

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the server end with its last client; after ``timeout_s`` it ends with clients and all."""
        pipe = self._child.stdin
        if self.alive and pipe is not None and not pipe.closed:
            with contextlib.suppress(BrokenPipeError):
                pipe.write(b".")
                pipe.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout_s)
        self._end()

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(5.0 if kind is None else 0.0)


def start(
    node: str = "h100x8",
    *,
    schedule: str = "timed",
    seed: int = 0,
    strict: str = "error",
    wait_limit_s: float = 60.0,
    clients: int = 0,
) -> NodeProcess:
    """Start a server of ``node`` ("h100", "h100x8") and return when it listens.

    ``wait_limit_s``: wall seconds that a call waits for what only another process can do. ``clients``: how
    many processes will attach (0: nobody knows); once they have, a deadlock of all is reported at once.
    Raises ValueError for settings that there are not, RuntimeError when the server does not start; what it
    has to say is on standard error.
    """
    for name, value, known in (("schedule", schedule, SCHEDULES), ("strict", str(strict), tuple(Strict))):
        if value not in known:
            raise ValueError(f"{name} is one of {', '.join(known)} (got {value!r})")
    command = [sys.executable, "-m", "smfree.emulator.server", "--lifeline", "--node", node]
    command += ["--schedule", schedule, "--seed", str(seed), "--strict", str(strict)]
    command += ["--wait-limit", str(wait_limit_s), "--clients", str(clients)]
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # an interrupt from the terminal is the parent's to handle
    )
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], _START_TIMEOUT_S)
    address = child.stdout.readline().decode().strip() if ready else ""
    if not address:
        _stop(child)
        raise RuntimeError(f"the process that serves the node {node!r} did not start; see its message above")
    return NodeProcess(child, address)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End of file ends the server at once."""
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    try:
        child.wait(2.0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
