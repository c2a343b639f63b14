"""What a rank has: its number, its peers, its GPU."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from smfree.cuda.device import Device
from smfree.ranks.errors import RankError
from smfree.ranks.gpus import Gpus
from smfree.ranks.rendezvous import Rendezvous

if TYPE_CHECKING:
    from smfree.emulator.server import NodeProcess


@dataclass(eq=False)
class RankContext:
    """One rank. ``local_rank`` counts the ranks of this host; ``device`` is its GPU, open.

    A context manager: at its end the ranks wait for each other, so that none takes away memory that another
    still uses; then device and rendezvous are closed. After an exception nobody waits, and the others are
    told.
    """

    rank: int
    world_size: int
    local_rank: int
    rendezvous: Rendezvous
    _device: Device | None = None
    _node: NodeProcess | None = None

    @property
    def device(self) -> Device:
        """The rank's GPU. Raises RankError when the ranks were made without."""
        if self._device is None:
            raise RankError("these ranks have no device (device=None); name one, such as 'emu:h100x8'")
        return self._device

    def open(self, gpus: Gpus, node: NodeProcess | None = None) -> None:
        """Open the rank's GPU. ``node``: what serves it, if this rank is to end that."""
        self._node = node
        self._device = gpus.open(self.local_rank)

    def __enter__(self) -> RankContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")

    def close(self, reason: str = "") -> None:
        """Leave; ``reason`` says that this rank has failed."""
        if not reason:
            with contextlib.suppress(RankError):
                self.rendezvous.barrier("the end of the ranks", timeout_s=float("inf"))
        self.rendezvous.close(reason)
        if self._device is not None:
            self._device.close()
        if self._node is not None:
            self._node.close()
