"""What the tests of the node server share: servers by their settings, client drivers, client processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from smfree.emulator.server import NodeProcess, RemoteDriver, start
from smfree.emulator.server.link import Link
from tests.emulator.driver_kit import ok

WAIT_LIMIT_S = 1.0


class Servers:
    """Servers that live for a test module, one per node and settings."""

    def __init__(self) -> None:
        self._running: dict[tuple[Any, ...], NodeProcess] = {}

    def node(self, *profiles: str, **settings: Any) -> NodeProcess:
        """The server of a node of equal ``profiles``."""
        name = f"{profiles[0]}x{len(profiles)}" if profiles else "h100"
        key = (name, *sorted(settings.items()))
        if key not in self._running:
            self._running[key] = start(name, **{"wait_limit_s": WAIT_LIMIT_S, **settings})
        return self._running[key]

    def driver(self, *profiles: str, **settings: Any) -> RemoteDriver:
        """A client of its own on it, as another process would be, with device 0's context current."""
        return opened(RemoteDriver(Link(self.node(*profiles, **settings).address)))

    def close(self) -> None:
        for node in self._running.values():
            node.close(0.0)


def opened(driver: Any, ordinal: int = 0) -> Any:
    """A driver with the primary context of a device current."""
    ok(driver.cuInit(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(ordinal))))
    return driver


@contextmanager
def child(function: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """A process that runs ``function(connection, *arguments)``; killed at the end if it still runs."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=function, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        here.close()
        process.join(0.2)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def told(connection: Connection) -> Any:
    """The next thing a child says."""
    assert connection.poll(30.0), "the child said nothing"
    return connection.recv()
