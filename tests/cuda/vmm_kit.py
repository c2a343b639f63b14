"""A fake driver with virtual memory management and multicast objects, for what only real GPUs refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.cuda.fake_driver import FakeDriver

PAGE = 2 << 20


class VmmDriver(FakeDriver):
    """Handles and addresses are numbers; ``fail`` and ``log`` as usual."""

    def __init__(self, **attributes: int) -> None:
        names = (
            "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
            "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
            "MULTICAST_SUPPORTED",
        )
        super().__init__(**dict.fromkeys(names, 1) | attributes)

    def answers(self) -> dict[str, Callable[..., tuple[Any, ...]]]:
        handle = lambda *args: (next(self._handles),)  # noqa: E731
        return super().answers() | {
            "cuMemGetAllocationGranularity": lambda *args: (PAGE,),
            "cuMemCreate": handle,
            "cuMemAddressReserve": handle,
            "cuMulticastGetGranularity": lambda *args: (2 * PAGE,),
            "cuMulticastCreate": handle,
        }
