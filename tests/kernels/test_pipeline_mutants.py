"""Ping-pong and rings with one line changed, and what the emulated GPU says. Their originals stay clean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kernels.mbarrier.pingpong import PingpongConfig
from kernels.mbarrier.pipeline import PipelineConfig
from kernels.mbarrier.registry import PIPELINES
from kernels.mbarrier.ring import RingConfig
from kernels.mbarrier.ring_async import RingAsyncConfig
from smfree.cuda import Device
from tests.kernels.mutant_kit import mutated, reported

PINGPONG = PingpongConfig(1024, 2, 64, max_ctas=1)
RING = RingConfig(1024, 2, 96, max_ctas=1)
RING_ASYNC = RingAsyncConfig(1024, 2, 96, max_ctas=1)


@dataclass(frozen=True)
class Mutant:
    """``old`` replaced by ``new``; the report under any of ``schedules`` must contain all of ``words``."""

    config: PipelineConfig
    old: str
    new: str
    words: tuple[str, ...]
    schedules: tuple[str, ...] = ("timed", "min-pc", "async-latest")


MUTANTS = {
    "ping-pong announces x and forgets y": Mutant(
        PINGPONG,
        "COPIES * bytes",
        "bytes",
        ("reads the destination of the cp.async.bulk load of 1024 bytes", "which is not complete"),
    ),
    "ping-pong announces a tile too many": Mutant(
        PINGPONG,
        "COPIES * bytes",
        "(COPIES + 1) * bytes",
        (
            "full[0] of CTA 0, phase 0 (parity 0): 1024 of 3072 bytes missing, 0 of 1 arrivals missing",
            "waiting: CTA 0 threads 0-63 at pingpong.cu",
        ),
    ),
    "ping-pong does not flip its parity": Mutant(
        PINGPONG,
        "s = 0, phase ^= 1;",
        "s = 0;",
        ("reads the destination of the cp.async.bulk load of 1024 bytes", "which is not complete"),
    ),
    "ping-pong refills a buffer that the store still reads": Mutant(
        PINGPONG,
        "cp_async_bulk_wait_group_read<0>();",
        "",
        ("overwrites the source of the cp.async.bulk store of 1024 bytes", "has not been read yet"),
        ("min-pc",),
    ),
    "ping-pong leaves while its store still reads": Mutant(
        PINGPONG,
        "if (asks) cp_async_bulk_wait_group<0>();",
        "",
        ("CTA 0 exits while the cp.async.bulk store of", "still uses its shared memory", "pingpong.cu"),
    ),
    "ring: one warp of two does not arrive": Mutant(
        RING,
        "if (consumer % 32 == 0) mbarrier_arrive",
        "if (consumer == 0) mbarrier_arrive",
        (
            "full[0] of CTA 0, phase 1 (parity 1): no bytes announced, 1 of 1 arrivals missing",
            "waiting: CTA 0 threads 32-95 at ring.cu",
            "empty[0] of CTA 0, phase 0 (parity 0): no bytes announced, 1 of 2 arrivals missing",
            "waiting: CTA 0 thread 0 at ring.cu",
        ),
    ),
    "ring: every lane arrives": Mutant(
        RING,
        "if (consumer % 32 == 0) mbarrier_arrive",
        "mbarrier_arrive",
        ("more arrivals than phase 0 expects: 64 by 64 lanes at once, 2 of 2 pending", "ring.cu"),
    ),
    "ring: the moving thread does not wait for the consumers": Mutant(
        RING,
        "wait_parity(empty_at(s), phase);",
        "",
        ("cp.async.bulk store reads", "the destination of the cp.async.bulk load", "which is not complete"),
    ),
    "ring: consumers do not wait for the bytes": Mutant(
        RING,
        "wait_parity(full_at(s), phase);",
        "",
        ("load of 16 bytes", "reads 16 bytes nobody has written", "CTA 0 thread 32, ring.cu"),
    ),
    "ring: the moving thread does not flip its parity": Mutant(
        RING,
        "      request += gridDim.x;\n    }\n    if (++s == NUM_STAGES) s = 0, phase ^= 1;",
        "      request += gridDim.x;\n    }\n    if (++s == NUM_STAGES) s = 0;",
        ("cp.async.bulk store reads", "the destination of the cp.async.bulk load", "which is not complete"),
    ),
    "ring of cp.async: lanes arrive before their copies have landed": Mutant(
        RING_ASYNC,
        "cp_async_mbarrier_arrive_noinc(full_at(s));",
        "mbarrier_arrive(full_at(s));",
        ("reads the destination of the cp.async of 16 bytes", "which is not complete"),
    ),
    "ring of cp.async: the first fill waits, too": Mutant(
        RING_ASYNC,
        "wait_parity(empty_at(s), phase ^ 1);",
        "wait_parity(empty_at(s), phase);",
        (
            "full[0] of CTA 0, phase 0 (parity 0): no bytes announced, 32 of 32 arrivals missing",
            "nobody ever arrived at it",
            "empty[0] of CTA 0, phase 0 (parity 0): no bytes announced, 64 of 64 arrivals missing",
            "waiting: CTA 0 threads 0-31 at ring_async.cu",
        ),
    ),
    "ring of cp.async: a stage is refilled before it has been read": Mutant(
        RING_ASYNC,
        "    wait_parity(empty_at(s), phase ^ 1);\n",
        "",
        ("overwrites the destination of the cp.async of 16 bytes", "which is not complete"),
    ),
}


def run(config: PipelineConfig, schedule: str) -> None:
    """Eleven tiles through one CTA; the result is right, or the kernel has failed."""
    pipeline = next(one for one in PIPELINES.values() if one.config_type.file == config.file)
    x, y = np.random.default_rng(3).integers(-8, 9, (2, 11 * 256 - 40)).astype(np.float32)
    with Device.open("emu:h100", schedule=schedule) as device:
        on_x, on_y, dst = device.asarray(x), device.asarray(y), device.empty(x.shape, np.float32)
        pipeline.run(dst, on_x, on_y, alpha=2.0, config=config)
        device.synchronize()
        np.testing.assert_array_equal(dst.numpy(), 2 * x + y)


@pytest.mark.parametrize(
    ("name", "schedule"), [(name, schedule) for name, one in MUTANTS.items() for schedule in one.schedules]
)
def test_the_mistake_is_reported_by_content(name: str, schedule: str) -> None:
    mutant = MUTANTS[name]
    with reported(*mutant.words):
        run(mutated(mutant.config, (mutant.old, mutant.new)), schedule)


@pytest.mark.parametrize("schedule", ["timed", "min-pc", "async-latest"])
@pytest.mark.parametrize("config", [PINGPONG, RING, RING_ASYNC], ids=lambda config: config.file)
def test_the_original_is_clean(config: PipelineConfig, schedule: str) -> None:
    run(config, schedule)
