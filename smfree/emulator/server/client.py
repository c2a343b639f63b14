"""The driver of a client: the calls of :class:`smfree.emulator.driver.Driver`, carried out by the server.

Names, parameters and return tuples are the same. What a call reads or writes in this process's memory is
handled here: bytes travel, arguments are packed, page-locked memory is mapped. When the server is gone, every
call returns CUDA_ERROR_MPS_RPC_FAILURE, and :meth:`RemoteDriver.report` says so.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cuda

from smfree.emulator.driver import Driver, NotEmulated
from smfree.emulator.server.calls import PLAIN, REFUSED, SPECIAL, is_node_address
from smfree.emulator.server.client_calls import Returned
from smfree.emulator.server.launch_calls import ClientLaunchCalls
from smfree.emulator.server.link import Link, NodeLost
from smfree.emulator.server.memory_calls import ClientMemoryCalls
from smfree.emulator.server.remote import RemoteNode


def attach(address: str, label: str = "") -> RemoteDriver:
    """This process's driver on the node served at ``address`` (what ``SMFREE_NODE`` holds).

    One per process: a second call gives the same one while it is in use. Raises NodeLost.
    """
    driver = _ATTACHED.get(address)
    if driver is None or driver.lost:
        driver = _ATTACHED[address] = RemoteDriver(Link(address, label))
    return driver


_ATTACHED: weakref.WeakValueDictionary[str, RemoteDriver] = weakref.WeakValueDictionary()


class RemoteDriver(ClientMemoryCalls, ClientLaunchCalls):
    """The stand-in driver of a client process. Ends with :meth:`end`, or when nobody uses it."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.node = RemoteNode(link)

    @property
    def lost(self) -> bool:
        """Whether the server is out of reach, now and for ever."""
        return bool(self._link.lost)

    def end(self) -> None:
        """Leave the node; everything this process had there goes."""
        self._link.close()

    # ------------------------------------------------------------------- what the emulator adds to a driver

    def host_seconds(self) -> float:
        """The modelled clock of this process's host, as for :meth:`Driver.host_seconds`. Raises NodeLost."""
        return float(self._link.request("host_seconds", ())[0])

    def report(self) -> str:
        """Full text of the latest error: rule, value, remedy, and which launch it came from."""
        if self._report is not None:
            return self._report
        try:
            return str(self._link.request("report", ())[0])
        except NodeLost as error:
            return str(error)

    def context_failed(self, ctx: Any) -> bool:
        """Whether a kernel's fault has killed the context, so that every call in it is refused."""
        try:
            return bool(self._link.request("context_failed", (int(ctx),))[0])
        except NodeLost:
            return True

    def describe_function(self, function: Any, *, registers: int, local_bytes: int = 0) -> None:
        """Tell what ptxas found, as for :meth:`Driver.describe_function`."""
        self._link.request("describe_function", (function, registers, local_bytes))

    def place_host_memory(self, address: int, nbytes: int, numa_node: int | None) -> None:
        """Say on which NUMA node page-locked memory lies, as for :meth:`Driver.place_host_memory`."""
        there = self._memory.on_node(address)
        if is_node_address(there):
            with contextlib.suppress(NodeLost):
                self._link.request("place_host_memory", (there, nbytes, numa_node))
        elif numa_node is not None:
            raise ValueError("pageable memory of a client of a served node has no NUMA node; use page-locked")

    def __getattr__(self, name: str) -> Any:
        """Types and constants of the real module; functions that are not served raise NotEmulated."""
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(cuda, name)
        if name.startswith("cu") and callable(found) and not isinstance(found, type):
            why = REFUSED.get(name, "smfree.emulator.driver and smfree.emulator.server list what is")
            raise NotEmulated(f"{name} is not emulated on a node that another process serves; {why}")
        return found


def _plain(name: str) -> Callable[..., Returned]:
    """A call that the server carries out as it stands."""
    real = getattr(Driver, name)
    signature = inspect.signature(real)

    @functools.wraps(real)
    def call(self: RemoteDriver, *args: Any, **kwargs: Any) -> Returned:
        if kwargs:
            args = signature.bind(self, *args, **kwargs).args[1:]
        return self._ask(name, args)[0]

    return call


for _name in PLAIN - SPECIAL:
    if hasattr(Driver, _name):
        setattr(RemoteDriver, _name, _plain(_name))
