"""What every call of a client's driver does: ask the server, or refuse here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from smfree.emulator.driver import Driver
from smfree.emulator.driver.errors import CUresult, Refusal
from smfree.emulator.server.host import ClientMemory
from smfree.emulator.server.link import Link, NodeLost

SUCCESS = CUresult.CUDA_SUCCESS
LOST = CUresult.CUDA_ERROR_MPS_RPC_FAILURE
"""What every call returns once the server is gone; the driver's code for a lost server of its own."""

Returned = tuple[Any, ...]


def special(method: Callable[..., Any]) -> Callable[..., Returned]:
    """A call with a way of its own: it returns what the server returned, or raises Refusal."""
    real = getattr(Driver, method.__name__)
    signature = inspect.signature(real)

    @functools.wraps(real)
    def call(self: ClientCalls, *args: Any, **kwargs: Any) -> Returned:
        if kwargs:
            args = signature.bind(self, *args, **kwargs).args[1:]
        try:
            result: Returned = method(self, *args)
        except Refusal as refusal:
            return self._refuse(method.__name__, refusal)
        return result

    return call


class ClientCalls:
    """A link, this process's memory that the node knows, and the latest failure."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._memory = ClientMemory()
        self._report: str | None = None
        """The latest failure's report when it arose here; None: ask the server."""

    def _call(self, name: str, *arguments: Any) -> Returned:
        return self._ask(name, arguments)[0]

    def _ask(
        self, name: str, arguments: tuple[Any, ...], fds: Sequence[int] = (), into: memoryview | None = None
    ) -> tuple[Returned, list[int]]:
        """Have the server do it: what it returned, None for every value after a failure, and descriptors."""
        try:
            result, _, received = self._link.request(name, arguments, fds, into)
        except NodeLost as error:
            code = CUresult.CUDA_ERROR_NOT_INITIALIZED if self._link.forked else LOST
            return self._refuse(name, Refusal(code, str(error))), []
        if result[0] == SUCCESS:
            return result, received
        if result[0] != CUresult.CUDA_ERROR_NOT_READY:
            self._report = None
        return self._failed(name, result[0]), received

    def _refuse(self, name: str, refusal: Refusal) -> Returned:
        self._report = f"{name}: {refusal.code.name}: {refusal.message}"
        return self._failed(name, refusal.code)

    @staticmethod
    def _failed(name: str, code: Any) -> Returned:
        return (code, *(None,) * getattr(Driver, name).emulated_outputs)
