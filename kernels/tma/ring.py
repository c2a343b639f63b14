"""The configuration of a ring of stages in which one thread asks for every tile and sends it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels.common import check_shared, check_stages, check_whole, persistent_grid, require
from smfree.cuda import Capabilities


@dataclass(frozen=True, kw_only=True)
class RingConfig:
    """``num_stages`` tiles in flight per CTA; at most ``max_ctas`` CTAs, which stride over the tiles (None:
    one per SM). Raises ConfigError.

    ``STAGE_ALIGN``: alignment of a stage in bytes; the barriers, static, are padded to it.
    """

    STAGE_ALIGN: ClassVar[int] = 128

    num_stages: int = 4
    max_ctas: int | None = None

    def __post_init__(self) -> None:
        check_stages(self.num_stages)
        if self.max_ctas is not None:
            check_whole("max_ctas", self.max_ctas)
            require(self.max_ctas >= 1, "max_ctas must be at least 1", self.max_ctas, "leave it out")

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in shared memory."""
        raise NotImplementedError

    @property
    def full_arrivals(self) -> int:
        """Arrivals that complete a phase of ``full[s]``: the asking thread's."""
        return 1

    @property
    def expect_tx_bytes(self) -> int:
        """Bytes that complete a phase of ``full[s]``: those of a whole tile."""
        return self.tile_bytes

    @property
    def stage_bytes(self) -> int:
        """Distance of two stages in shared memory."""
        return -(-self.tile_bytes // self.STAGE_ALIGN) * self.STAGE_ALIGN

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: the stages. The barriers are static."""
        return self.num_stages * self.stage_bytes

    def grid_for(self, num_tiles: int, capabilities: Capabilities) -> int:
        """CTAs to launch. Raises ConfigError when the stages do not fit the device's shared memory."""
        check_shared(self.shared_bytes + self.STAGE_ALIGN, capabilities)
        return persistent_grid(capabilities, min(num_tiles, self.max_ctas or num_tiles), 1)
