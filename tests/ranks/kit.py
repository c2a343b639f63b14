"""Ranks as threads of one process, or as processes that a test may kill."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from smfree.ranks import UnixRendezvous

ROOT = Path(__file__).parents[2]


def under_torchrun(script: Path, text: str, world_size: int, *, timeout_s: float) -> list[str]:
    """Run ``text``, written to ``script``, as so many processes; the lines they print, sorted. They share a
    pipe without buffers (torchrun starts Python with -u): a line must be printed as one string, with its end.
    """
    script.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, "--nproc-per-node", str(world_size), str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def new_name() -> str:
    """A rendezvous that no other test has."""
    return f"test-{secrets.token_hex(8)}"


def as_threads(
    function: Callable[[UnixRendezvous], Any], world_size: int, *, timeout_s: float = 20.0
) -> list[Any]:
    """Run ``function(rendezvous)`` as each rank; a list of what they return, or the exceptions they raise."""
    name = new_name()

    def rank(number: int) -> Any:
        with UnixRendezvous(name, number, world_size, timeout_s=timeout_s) as rendezvous:
            return function(rendezvous)

    with ThreadPoolExecutor(world_size) as pool:
        futures: list[Future[Any]] = [pool.submit(rank, number) for number in range(world_size)]
        return [future.exception() or future.result() for future in futures]
