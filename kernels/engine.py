"""The engines that can move a tile, behind one interface: what benchmarks and tests iterate over.

An engine copies (``copy``, at a ``throughput_config``) and most walk a dependent chain (``chain``, at a
``latency_config``). ``path`` says which way the bytes go, so that a table never compares two paths unmarked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kernels.chain import ChainConfig, Leg
from kernels.common import (
    ConfigError,
    LaunchInfo,
    OperandError,
    check_threads,
    check_whole,
    require,
    tma_unavailable,
)
from kernels.lsu import chain as lsu_chain
from kernels.lsu import chain_async as lsu_chain_async
from kernels.lsu import copy as lsu_copy
from kernels.lsu import copy_async as lsu_copy_async
from kernels.tma import bulk as tma_bulk
from kernels.tma import chain_bulk as tma_chain_bulk
from kernels.tma import chain_tensor as tma_chain_tensor
from kernels.tma import tensor2d as tma_tensor2d
from smfree.cuda import Capabilities, CudaSource, DeviceArray, Stream, TritonSource, triton_unavailable

__all__ = [
    "ENGINES",
    "ChainConfig",
    "ConfigError",
    "CopyConfig",
    "Engine",
    "LaunchInfo",
    "Leg",
    "OperandError",
    "engine",
]


class CopyConfig(Protocol):
    """What every configuration tells, whichever engine it belongs to; all sizes in bytes."""

    @property
    def tile_bytes(self) -> int: ...

    @property
    def num_stages(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def ctas_per_sm(self) -> int: ...

    @property
    def shared_bytes(self) -> int: ...

    @property
    def bytes_in_flight_per_cta(self) -> int: ...

    @property
    def source(self) -> CudaSource | TritonSource: ...


@dataclass(frozen=True)
class Engine:
    """One way to move bytes. ``module`` gives the functions of its copy; imported at first use for Triton."""

    name: str
    path: str
    module: Callable[[], Any]
    unavailable: Callable[[Capabilities], str | None]
    chains: Any = None
    legs: tuple[Leg, ...] = ()
    twin_of: str | None = None

    def throughput_config(
        self,
        capabilities: Capabilities,
        tile_bytes: int,
        *,
        bytes_in_flight_per_sm: int | None = None,
        threads: int | None = None,
    ) -> CopyConfig:
        """The copy's configuration with exactly so many bytes in flight per SM (None: the engine at its best)
        and so many threads per CTA (None: what suits it). Raises ConfigError with the reason if impossible.
        """
        if bytes_in_flight_per_sm is not None:
            check_whole("bytes_in_flight_per_sm", bytes_in_flight_per_sm)
            require(
                bytes_in_flight_per_sm > 0,
                "bytes_in_flight_per_sm must be positive",
                bytes_in_flight_per_sm,
                "leave it out for the engine at its best",
            )
        if threads is not None:
            check_threads(threads)
        return self.module().throughput_config(
            capabilities, tile_bytes, bytes_in_flight_per_sm=bytes_in_flight_per_sm, threads=threads
        )

    def copy(
        self, dst: DeviceArray, src: DeviceArray, *, config: CopyConfig, stream: Stream | None = None
    ) -> LaunchInfo:
        """Queue a copy of ``src`` to ``dst``. Raises OperandError or ConfigError before any launch."""
        return self.module().copy(dst, src, config=config, stream=stream)

    def latency_config(
        self, capabilities: Capabilities, tile_bytes: int, threads: int, leg: Leg = Leg.LOAD
    ) -> ChainConfig:
        """The chain's configuration: one CTA. Raises ConfigError when the engine has no such leg."""
        if leg not in self.legs:
            known = ", ".join(self.legs) or "none"
            raise ConfigError(f"{self.name} has latency legs: {known} (got {leg}); skip it")
        return self.chains.latency_config(capabilities, tile_bytes, threads, leg)

    def chain(
        self,
        dst: DeviceArray | None,
        pool: DeviceArray,
        result: DeviceArray,
        *,
        config: ChainConfig,
        num_steps: int,
        stream: Stream | None = None,
    ) -> LaunchInfo:
        """Queue a chain of ``num_steps`` tiles of ``pool`` (see :class:`kernels.chain.TilePool`); ``result``
        gets SM cycles, nanoseconds, and the index after the last step. Raises OperandError, ConfigError."""
        if self.chains is None:
            raise ConfigError(f"{self.name} has no latency chain (got {config}); use {self.twin_of}")
        return self.chains.chain(dst, pool, result, config=config, num_steps=num_steps, stream=stream)


def _pointer_twin() -> Any:
    from kernels.lsu import copy_triton  # importing Triton takes a second

    return copy_triton


def _descriptor_twin() -> Any:
    from kernels.tma import tensor2d_triton

    return tensor2d_triton


_ALL_LEGS = (Leg.LOAD, Leg.STORE, Leg.COPY)

ENGINES: dict[str, Engine] = {
    made.name: made
    for made in (
        Engine(
            "lsu",
            "global -> registers -> shared -> registers -> global",
            lambda: lsu_copy,
            lsu_copy.unavailable,
            lsu_chain,
            _ALL_LEGS,
        ),
        Engine(
            "cp.async",
            "global -> shared -> registers -> global",
            lambda: lsu_copy_async,
            lsu_copy_async.unavailable,
            lsu_chain_async,
            (Leg.LOAD, Leg.COPY),
        ),
        Engine(
            "tma.bulk",
            "global -> shared -> global",
            lambda: tma_bulk,
            tma_unavailable,
            tma_chain_bulk,
            _ALL_LEGS,
        ),
        Engine(
            "tma.tensor",
            "global -> shared -> global",
            lambda: tma_tensor2d,
            tma_unavailable,
            tma_chain_tensor,
            _ALL_LEGS,
        ),
        Engine(
            "triton.pointer",
            "global -> registers -> global",
            _pointer_twin,
            lambda capabilities: triton_unavailable(),
            twin_of="lsu",
        ),
        Engine(
            "triton.descriptor",
            "global -> shared -> global",
            _descriptor_twin,
            lambda capabilities: tma_unavailable(capabilities) or triton_unavailable(),
            twin_of="tma.tensor",
        ),
    )
}


def engine(name: str) -> Engine:
    """An engine by name. Raises KeyError listing those there are."""
    if name not in ENGINES:
        raise KeyError(f"no engine {name!r}; there are {', '.join(ENGINES)}")
    return ENGINES[name]
