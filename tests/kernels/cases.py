"""Every kernel in every variant that tests compile: what it is made of, and where its instructions exist."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kernels.chain import Leg
from kernels.lsu.chain import LsuChainConfig
from kernels.lsu.chain_async import AsyncChainConfig
from kernels.lsu.copy import LsuCopyConfig
from kernels.lsu.copy_async import AsyncCopyConfig, CacheOperator
from kernels.tma.bulk import BulkConfig
from kernels.tma.chain_bulk import BulkChainConfig
from kernels.tma.chain_tensor import TensorChainConfig
from kernels.tma.tensor2d import Tensor2dConfig
from smfree.cuda import ModuleImage, compile_cuda
from smfree.cuda.sass import SassFunction

EVERY_ARCH = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
TMA_ARCHS = EVERY_ARCH[1:]
WIDE_ARCHS = EVERY_ARCH[2:]
ASYNC_STEMS = frozenset({"LDGSTS", "UBLKCP", "UTMALDG", "UTMASTG"})


@dataclass(frozen=True)
class Case:
    """A configuration, the architectures that have its instructions, and the SASS stems of the async engines
    that it must contain; it must contain no other of them."""

    name: str
    config: Any
    archs: tuple[str, ...] = EVERY_ARCH
    async_stems: frozenset[str] = field(default_factory=frozenset)

    def image(self, arch: str) -> ModuleImage:
        """The compiled module, through the cache."""
        return _image(self.config, arch)

    def sass(self, arch: str) -> SassFunction:
        """Its disassembly."""
        return _sass(self.config, arch)


@cache
def _image(config: Any, arch: str) -> ModuleImage:
    return compile_cuda(config.source, arch)


@cache
def _sass(config: Any, arch: str) -> SassFunction:
    return _image(config, arch).sass()


def _lsu() -> list[Case]:
    cases = [
        Case(
            f"lsu-{vector}B-unroll{unroll}{'-nc' if read_only else ''}",
            LsuCopyConfig(16384, 128, vector, unroll, read_only),
            WIDE_ARCHS if vector == 32 else EVERY_ARCH,
        )
        for vector, unroll, read_only in [
            (4, 4, False),
            (8, 4, False),
            (16, 1, False),
            (16, 2, False),
            (16, 4, False),
            (16, 8, False),
            (32, 4, False),
            (4, 4, True),
            (8, 4, True),
            (16, 4, True),
            (32, 4, True),
        ]
    ]
    ldgsts = frozenset({"LDGSTS"})
    cases += [
        Case(f"cp.async-{stages}stages", AsyncCopyConfig(4096, stages, 128), async_stems=ldgsts)
        for stages in (1, 4)
    ]
    cases += [
        Case(
            f"cp.async-ca-{vector}B",
            AsyncCopyConfig(4096, 2, 128, vector, CacheOperator.CA),
            async_stems=ldgsts,
        )
        for vector in (4, 8, 16)
    ]
    cases += [Case(f"lsu-chain-{leg}", LsuChainConfig(4096, 128, leg)) for leg in Leg]
    cases += [
        Case(f"cp.async-chain-{leg}", AsyncChainConfig(4096, 128, leg), async_stems=ldgsts)
        for leg in (Leg.LOAD, Leg.COPY)
    ]
    return cases


def _tma() -> list[Case]:
    bulk, tensor = frozenset({"UBLKCP"}), frozenset({"UTMALDG", "UTMASTG"})
    cases = [Case(f"bulk-{stages}stages", BulkConfig(4096, stages), TMA_ARCHS, bulk) for stages in (1, 4)]
    cases += [
        Case(f"tensor2d-{stages}stages", Tensor2dConfig(4096, stages), TMA_ARCHS, tensor) for stages in (1, 4)
    ]
    cases += [Case(f"bulk-chain-{leg}", BulkChainConfig(4096, 128, leg), TMA_ARCHS, bulk) for leg in Leg]
    cases += [
        Case(
            f"tensor-chain-{leg}",
            TensorChainConfig(4096, 128, leg),
            TMA_ARCHS,
            tensor if leg is not Leg.LOAD else frozenset({"UTMALDG"}),
        )
        for leg in Leg
    ]
    return cases


CASES = _lsu() + _tma()
COMPILED = [(case, arch) for case in CASES for arch in case.archs]
COMPILED_IDS = [f"{case.name}-{arch}" for case, arch in COMPILED]
