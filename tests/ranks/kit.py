"""Ranks as threads of one process, or as processes that a test may kill."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from smfree.ranks import UnixRendezvous


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
