"""Every kernel in every variant that tests compile: what it is made of, and where its instructions exist."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kernels.chain import Leg
from kernels.lsu.cached import CachedCopyConfig, LoadCache, StoreCache
from kernels.lsu.chain import LsuChainConfig
from kernels.lsu.chain_async import AsyncChainConfig
from kernels.lsu.copy import LsuCopyConfig
from kernels.lsu.copy_async import AsyncCopyConfig, CacheOperator
from kernels.lsu.gather import GatherConfig
from kernels.lsu.pad_async import PadConfig
from kernels.lsu.transpose import Layout, TransposeConfig
from kernels.mbarrier.cluster import ClusterConfig
from kernels.mbarrier.matmul import MatmulConfig
from kernels.mbarrier.persistent import PersistentConfig
from kernels.mbarrier.phases import PhasesConfig
from kernels.mbarrier.pingpong import PingpongConfig
from kernels.mbarrier.pipeline import Part
from kernels.mbarrier.reduction import ReductionConfig
from kernels.mbarrier.ring import RingConfig
from kernels.mbarrier.ring_async import RingAsyncConfig
from kernels.mbarrier.specialised import SpecialisedConfig
from kernels.tma.bulk import BulkConfig
from kernels.tma.chain_bulk import BulkChainConfig
from kernels.tma.chain_tensor import TensorChainConfig
from kernels.tma.descriptor import DescriptorConfig, Maps
from kernels.tma.dsmem import DsmemConfig, Path
from kernels.tma.multicast_bulk import MulticastBulkConfig
from kernels.tma.multicast_tensor import MulticastTensorConfig
from kernels.tma.prefetch import Policy
from kernels.tma.prefetch_bulk import PrefetchBulkConfig
from kernels.tma.prefetch_tensor import PrefetchTensorConfig
from kernels.tma.reduce_bulk import ReduceBulkConfig
from kernels.tma.reduce_tensor import ReduceTensorConfig
from kernels.tma.swizzle import SWIZZLES, Output, SwizzleConfig
from kernels.tma.tensor2d import Tensor2dConfig
from kernels.tma.tensor_nd import TensorNdConfig
from smfree.cuda import ModuleImage, compile_cuda
from smfree.cuda.sass import SassFunction

EVERY_ARCH = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
TMA_ARCHS = EVERY_ARCH[1:]
WIDE_ARCHS = EVERY_ARCH[2:]
MULTICAST_ARCHS = ("sm_90a", "sm_100a")
"""Where a multicast is an instruction; for sm_120 ptxas makes a call of it."""
ASYNC_STEMS = frozenset(
    {"LDGSTS", "STAS", "UBLKCP", "UBLKPF", "UBLKRED", "UTMALDG", "UTMAPF", "UTMAREDG", "UTMASTG"}
)


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
    cases += [Case(f"lsu-cached-{load}", CachedCopyConfig(load)) for load in LoadCache]
    cases += [Case(f"lsu-cached-store-{store}", CachedCopyConfig(store=store)) for store in StoreCache]
    cases += [
        Case(f"lsu-gather-{element}B{'' if indexed else '-strided'}", GatherConfig(element, indexed=indexed))
        for element in (4, 8, 16)
        for indexed in (True, False)
    ]
    cases += [Case(f"lsu-transpose-{layout}", TransposeConfig(layout)) for layout in Layout]
    ldgsts = frozenset({"LDGSTS"})
    cases += [Case(f"lsu-pad-{n}stages", PadConfig(num_stages=n), async_stems=ldgsts) for n in (1, 3)]
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


def _tma_family() -> list[Case]:
    """Tensors of every rank, swizzles, reductions, prefetch, descriptors, multicast, DSMEM."""
    bulk, loads, copies = frozenset({"UBLKCP"}), frozenset({"UTMALDG"}), frozenset({"UTMALDG", "UTMASTG"})
    cases = [
        Case(f"tensor-{rank}d", TensorNdConfig((*(2,) * (rank - 1), 16)), TMA_ARCHS, copies)
        for rank in range(1, 6)
    ]
    cases += [
        Case(f"swizzle-{kind.name}-{output.name}", SwizzleConfig(kind, output), TMA_ARCHS, loads)
        for kind in SWIZZLES
        for output in Output
    ]
    cases += [
        Case("reduce-bulk", ReduceBulkConfig(), TMA_ARCHS, bulk | {"UBLKRED"}),
        Case("reduce-tensor", ReduceTensorConfig(), TMA_ARCHS, loads | {"UTMAREDG"}),
    ]
    for policy in Policy:
        cases += [
            Case(f"bulk-{policy.name}", PrefetchBulkConfig(ahead=0, policy=policy), TMA_ARCHS, bulk),
            Case(
                f"bulk-{policy.name}-ahead", PrefetchBulkConfig(policy=policy), TMA_ARCHS, bulk | {"UBLKPF"}
            ),
            Case(f"tensor-{policy.name}", PrefetchTensorConfig(ahead=0, policy=policy), TMA_ARCHS, copies),
            Case(
                f"tensor-{policy.name}-ahead",
                PrefetchTensorConfig(policy=policy),
                TMA_ARCHS,
                copies | {"UTMAPF"},
            ),
        ]
    cases += [Case(f"maps-{maps.name}", DescriptorConfig(maps=maps), TMA_ARCHS, copies) for maps in Maps]
    for cluster, shared in ((2, True), (8, True), (4, False)):
        archs, name = MULTICAST_ARCHS if shared else TMA_ARCHS, "multicast" if shared else "apart"
        cases += [
            Case(
                f"{name}-bulk-{cluster}", MulticastBulkConfig(cluster=cluster, multicast=shared), archs, bulk
            ),
            Case(
                f"{name}-tensor-{cluster}",
                MulticastTensorConfig(cluster=cluster, multicast=shared),
                archs,
                copies,
            ),
        ]
    stems = {Path.PULL: bulk, Path.PUSH: bulk | {"STAS"}, Path.BULK: bulk}
    return cases + [
        Case(f"dsmem-{path.name}", DsmemConfig(path=path), TMA_ARCHS, stems[path]) for path in Path
    ]


def _core() -> list[Case]:
    """Ping-pong, the two rings, and the lesson in phases."""
    bulk, ldgsts = frozenset({"UBLKCP"}), frozenset({"LDGSTS"})
    cases = [
        Case("phases", PhasesConfig(), TMA_ARCHS, bulk),
        Case("phases-without-bytes", PhasesConfig(), EVERY_ARCH[:1]),
    ]
    for kind, archs, stems, depths in (
        (PingpongConfig, TMA_ARCHS, bulk, (1, 2)),
        (RingConfig, TMA_ARCHS, bulk, (1, 4, 8)),
        (RingAsyncConfig, EVERY_ARCH, ldgsts, (1, 4, 8)),
    ):
        name = kind.file.removesuffix(".cu")
        cases += [Case(f"{name}-{n}stages", kind(4096, n, work=9), archs, stems) for n in depths]
        cases.append(Case(f"{name}-copy-alone", kind(4096, 2, part=Part.COPY), archs, stems))
        cases.append(Case(f"{name}-compute-alone", kind(4096, 2, part=Part.COMPUTE), archs))
    return cases


def _mbarrier() -> list[Case]:
    bulk = frozenset({"UBLKCP"})
    ring = (1, 8)
    cases = [Case(f"specialised-{n}stages", SpecialisedConfig(4096, n), TMA_ARCHS, bulk) for n in ring]
    cases += [
        Case(f"specialised-{threads}threads", SpecialisedConfig(4096, 4, threads), TMA_ARCHS, bulk)
        for threads in (256, 512, 1024)
    ]
    cases += [
        Case("specialised-2ctas", SpecialisedConfig(4096, 2, ctas_per_sm=2), TMA_ARCHS, bulk),
        Case("specialised-fixed", SpecialisedConfig(4096, 4, producer_registers=0), TMA_ARCHS, bulk),
    ]
    cases += [Case(f"persistent-{n}stages", PersistentConfig(4096, n, 160), TMA_ARCHS, bulk) for n in ring]
    cases += [Case(f"reduction-{n}stages", ReductionConfig(4096, n), TMA_ARCHS, bulk) for n in ring]
    cases += [
        Case(
            f"cluster{size}-{'multicast' if multicast else 'apart'}-{n}stages",
            ClusterConfig(4096, n, cluster_size=size, multicast=multicast),
            MULTICAST_ARCHS if multicast else TMA_ARCHS,
            bulk,
        )
        for size, multicast, n in ((2, True, 1), (4, True, 4), (8, True, 8), (2, False, 1), (8, False, 8))
    ]
    for kind in (SpecialisedConfig, PersistentConfig, ReductionConfig, ClusterConfig):
        name = kind.file.removesuffix(".cu")
        archs = MULTICAST_ARCHS if kind is ClusterConfig else TMA_ARCHS
        cases.append(Case(f"{name}-copy-alone", kind(4096, 2, part=Part.COPY), archs, bulk))
        cases.append(Case(f"{name}-compute-alone", kind(4096, 2, part=Part.COMPUTE), TMA_ARCHS))
    loads = frozenset({"UTMALDG"})
    cases += _core()
    return cases + [Case(f"matmul-{n}stages", MatmulConfig(n), TMA_ARCHS, loads) for n in (1, 2, 3, 4, 8)]


CASES = _lsu() + _tma() + _tma_family() + _mbarrier()


def compiled(*, everywhere: bool) -> list[tuple[Case, str]]:
    """Cases and architectures: all that have the instructions, or Hopper (else the oldest) and, in turn, one
    of the others."""
    found = []
    for turn, case in enumerate(CASES):
        first = "sm_90a" if "sm_90a" in case.archs else case.archs[0]
        others = [arch for arch in case.archs if arch != first]
        chosen = others if everywhere or not others else [others[turn % len(others)]]
        found += [(case, arch) for arch in (first, *chosen)]
    return found
