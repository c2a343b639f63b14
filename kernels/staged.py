"""Tiles through stages in shared memory: what the configurations of copies and pipelines share.

A configuration knows who arrives on each barrier and which copies complete there. Arrival counts, bytes and
the layout of shared memory follow from that, before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import numpy as np

from kernels.common import (
    MAX_STAGES,
    LaunchInfo,
    check_ctas,
    check_operands,
    check_shared,
    check_stages,
    check_threads,
    check_tile,
    check_whole,
    launch,
    persistent_grid,
    plain_integers,
    require,
)
from kernels.occupancy import place_stages
from smfree.cuda import Capabilities, CudaSource, DeviceArray, Stream

MBARRIER_BYTES = 8
MAX_COUNT = 2**20 - 1
"""Largest arrival count and largest tx-count of an mbarrier (PTX ISA, "Contents of the mbarrier object")."""
STAGE_ALIGN = 128
"""Alignment of the stages: a row of all 32 banks, and what tensor copies ask for."""


@dataclass(frozen=True)
class BarrierPlan:
    """One barrier per stage: what completes a phase of it.

    ``roles`` maps who arrives to how many arrivals ("consumer warp": 4), ``copies`` the copies that complete
    on it to their bytes ("x": 16384; None for a barrier of arrivals only). Raises ConfigError for counts that
    an mbarrier cannot hold.
    """

    name: str
    roles: Mapping[str, int]
    copies: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        for what, count, least in (("arrivals", self.arrivals, 1), ("bytes", self.tx_bytes, 0)):
            require(
                least <= count <= MAX_COUNT,
                f"a phase of {self.name}[] has {least} to {MAX_COUNT} {what}",
                f"{count}: {_sum(self.roles if what == 'arrivals' else self.copies or {})}",
                "use fewer threads" if what == "arrivals" else "use a smaller tile",
            )

    @property
    def arrivals(self) -> int:
        """Arrivals that complete a phase; the count given at init."""
        return sum(self.roles.values())

    @property
    def tx_bytes(self) -> int:
        """Bytes that complete a phase of a whole tile; what expect_tx announces."""
        return sum((self.copies or {}).values())

    @property
    def defines(self) -> dict[str, int]:
        """``FULL_ARRIVALS`` and, unless it takes arrivals only, ``FULL_TX_BYTES``."""
        name = self.name.upper()
        found = {f"{name}_ARRIVALS": self.arrivals}
        return found if self.copies is None else found | {f"{name}_TX_BYTES": self.tx_bytes}

    def check(self, arrivals: int | None, tx_bytes: int | None) -> None:
        """What the caller states, where he does (None: derive it), must follow from roles and copies.

        Raises ConfigError naming the barrier, both numbers and where the derived one comes from.
        """
        for stated, derived, unit, parts in (
            (arrivals, self.arrivals, "arrivals", self.roles),
            (tx_bytes, self.tx_bytes, "tx_bytes", self.copies or {}),
        ):
            if stated is not None:
                field_name = f"{self.name}_{unit}"
                require(
                    stated == derived,
                    f"a phase of {self.name}[] completes with {derived} {unit.removeprefix('tx_')}: "
                    f"{_sum(parts)}",
                    f"{field_name}={stated}",
                    f"leave {field_name} out to have it derived",
                )


@dataclass(frozen=True)
class StagedConfig:
    """``num_stages`` tiles of ``tile_bytes`` in the shared memory of a CTA of ``threads`` threads.

    ``min_shared_bytes`` limits the CTAs per SM. Raises ConfigError.
    """

    max_stages: ClassVar[int] = MAX_STAGES

    tile_bytes: int = 16384
    num_stages: int = 4
    threads: int = 32
    ctas_per_sm: int = field(default=1, kw_only=True)
    min_shared_bytes: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        plain_integers(self)
        check_tile(self.tile_bytes)
        check_stages(self.num_stages, at_most=self.max_stages)
        check_threads(self.threads)
        check_ctas(self.ctas_per_sm)
        check_whole("min_shared_bytes", self.min_shared_bytes)
        require(self.min_shared_bytes >= 0, "min_shared_bytes is 0 or more", self.min_shared_bytes, "use 0")

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """The mbarriers that each stage has."""
        return ()

    @property
    def stage_align(self) -> int:
        """Alignment of the stages, which follow the barriers in shared memory."""
        return STAGE_ALIGN

    @property
    def stage_bytes(self) -> int:
        """Distance of two stages in shared memory."""
        return self.tile_bytes

    @property
    def static_shared_bytes(self) -> int:
        """The barriers, padded to the alignment of the stages."""
        return round_up(len(self.barriers) * self.num_stages * MBARRIER_BYTES, self.stage_align)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: the stages."""
        return max(self.num_stages * self.stage_bytes, self.min_shared_bytes)

    @property
    def bytes_in_flight_per_cta(self) -> int:
        """Bytes that the CTA has asked for when it waits for the oldest."""
        return self.num_stages * self.tile_bytes

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        raise NotImplementedError

    def check_fits(self, capabilities: Capabilities) -> None:
        """Stages and barriers fit the device's shared memory. Raises ConfigError."""
        check_shared(self.shared_bytes + self.static_shared_bytes, capabilities)


Staged = TypeVar("Staged", bound=StagedConfig)


def placed(one: Staged, capabilities: Capabilities, bytes_in_flight_per_sm: int | None) -> Staged:
    """``one`` with the stages and CTAs that keep exactly so many bytes in flight per SM, or with those that
    suit it best when None: see :func:`kernels.occupancy.place_stages`. Raises ConfigError."""
    found = place_stages(
        capabilities,
        one.tile_bytes,
        one.threads,
        stage_bytes=one.stage_bytes,
        static_bytes=one.static_shared_bytes,
        bytes_in_flight_per_sm=bytes_in_flight_per_sm,
    )
    return replace(
        one,
        num_stages=found.num_stages,
        ctas_per_sm=found.ctas_per_sm,
        min_shared_bytes=found.min_shared_bytes,
    )


def run_copy(
    dst: DeviceArray,
    src: DeviceArray,
    *,
    config: StagedConfig,
    instruction: str,
    stream: Stream | None,
    maps: Callable[[], Sequence[object]] = tuple,
) -> LaunchInfo:
    """Check the operands of a copy as ``instruction`` demands, and launch it with ``maps``, dst, src and the
    number of bytes. Nothing is launched for zero bytes. Raises OperandError, ConfigError."""
    capabilities = src.device.capabilities
    config.check_fits(capabilities)
    check_operands(instruction, dst, src)
    if src.nbytes == 0:
        return LaunchInfo(None)
    return launch(
        config.source,
        persistent_grid(capabilities, -(-src.nbytes // config.tile_bytes), config.ctas_per_sm),
        config.threads,
        (*maps(), dst, src, np.uint64(src.nbytes)),
        device_array=src,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple


def _sum(parts: Mapping[str, int]) -> str:
    return " + ".join(f"{count} of {name}" for name, count in parts.items()) or "nothing completes on it"
