"""The configuration of a ring of stages in which one thread asks for every tile and sends it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels.common import (
    OperandError,
    check_shared,
    check_stages,
    check_whole,
    persistent_grid,
    plain_integers,
    require,
)
from kernels.staged import MBARRIER_BYTES, STAGE_ALIGN, BarrierPlan, round_up
from smfree.cuda import Capabilities, DeviceArray

MAX_BOX = 256
"""Elements of a box per dimension (cuTensorMapEncodeTiled)."""


@dataclass(frozen=True, kw_only=True)
class RingConfig:
    """``num_stages`` tiles in flight per CTA; at most ``max_ctas`` CTAs, which stride over the tiles (None:
    one per SM). Raises ConfigError.
    """

    stage_align: ClassVar[int] = STAGE_ALIGN
    """Alignment of a stage in bytes."""

    num_stages: int = 4
    max_ctas: int | None = None

    def __post_init__(self) -> None:
        plain_integers(self)
        check_stages(self.num_stages)
        if self.max_ctas is not None:
            check_whole("max_ctas", self.max_ctas)
            require(self.max_ctas >= 1, "max_ctas must be at least 1", self.max_ctas, "leave it out")

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile in shared memory."""
        raise NotImplementedError

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """``full[s]``: the asking thread, and a whole tile."""
        return (BarrierPlan("full", {"asking thread": 1}, {"tile": self.tile_bytes}),)

    @property
    def stage_bytes(self) -> int:
        """Distance of two stages in shared memory."""
        return round_up(self.tile_bytes, self.stage_align)

    @property
    def static_shared_bytes(self) -> int:
        """The barriers, padded to the alignment of the stages."""
        return round_up(len(self.barriers) * self.num_stages * MBARRIER_BYTES, self.stage_align)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: the stages. The barriers are static."""
        return self.num_stages * self.stage_bytes

    def grid_for(self, num_tiles: int, capabilities: Capabilities) -> int:
        """CTAs to launch. Raises ConfigError when the stages do not fit the device's shared memory."""
        check_shared(self.shared_bytes + self.static_shared_bytes, capabilities)
        return persistent_grid(capabilities, min(num_tiles, self.max_ctas or num_tiles), 1)


@dataclass(frozen=True, kw_only=True)
class BoxConfig(RingConfig):
    """A ring whose tiles are boxes of a matrix: ``box_rows`` rows of ``box_cols`` elements of
    ``element_bytes``. Raises ConfigError."""

    box_rows: int = 64
    box_cols: int = 64
    element_bytes: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("element_bytes", self.element_bytes)
        for name in ("box_rows", "box_cols"):
            edge = getattr(self, name)
            check_whole(name, edge)
            require(1 <= edge <= MAX_BOX, f"{name} is 1 to {MAX_BOX}", edge, "use 64")
        require(
            self.element_bytes in (1, 2, 4, 8),
            "element_bytes is 1, 2, 4 or 8",
            self.element_bytes,
            "view the arrays as such a dtype",
        )
        require(
            self.box_cols * self.element_bytes % 16 == 0,
            "a box's row is a multiple of 16 bytes",
            f"{self.box_cols} x {self.element_bytes} bytes",
            f"use a multiple of {16 // self.element_bytes} columns",
        )

    @property
    def tile_bytes(self) -> int:
        """Bytes of a box in shared memory; elements outside the matrix count, they are filled."""
        return self.box_rows * self.box_cols * self.element_bytes

    @property
    def box_defines(self) -> dict[str, object]:
        """What every kernel of boxes is compiled with."""
        return {
            "BOX_ROWS": self.box_rows,
            "BOX_COLS": self.box_cols,
            "TILE_BYTES": self.tile_bytes,
            "NUM_STAGES": self.num_stages,
        }

    def tiles(self, num_rows: int, num_cols: int) -> tuple[int, int]:
        """Boxes of a matrix: down and across."""
        return -(-num_rows // self.box_rows), -(-num_cols // self.box_cols)

    def check_rows(self, name: str, array: DeviceArray, rank: int = 2) -> None:
        """``array`` has ``rank`` dimensions and rows that a tensor map can step over. Raises OperandError."""
        row_bytes = array.shape[-1] * array.dtype.itemsize if array.shape else 0
        if len(array.shape) != rank or array.dtype.itemsize != self.element_bytes or row_bytes % 16:
            raise OperandError(
                f"{name} has {rank} dimensions, elements of {self.element_bytes} bytes and rows of a "
                f"multiple of 16 bytes (got {array.shape} {array.dtype}); reshape it, view it or pad its rows"
            )
