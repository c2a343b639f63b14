"""What each mistake in a ring of stages looks like: the emulated GPU's report, and a clean twin.

A fault that hangs gives the same report under every schedule. One that breaks the rules some other way shows
as each schedule lets it; the table says how, and where it does not show at all. Ids such as A03 are in
docs/cases.md.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.mbarrier.faults import Ending, Fault, FaultConfig, scale
from kernels.mbarrier.faults_cluster import ClusterFault, ClusterFaultConfig
from smfree.cuda import Device, KernelFaultError
from tests.kernels.pairwise import SCHEDULES

TILES = 7  # of two stages: three wraps of the ring and half a round
PASSES = ("passes: the run ends with the right result",)


def line_of(text: str) -> str:
    """ "faults.cu:72" for the only line that contains ``text``."""
    lines = FaultConfig().source.read().decode().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if text in line)
    return f"faults.cu:{number}"


FULL_WAIT = line_of("wait_parity(full_at(s), phase);")
EMPTY_WAIT = line_of("wait_parity(empty_at(s), phase ^ 1);")
LOAD = line_of("cp_async_bulk_shared_global(stage_at")
READ = line_of("ld_shared(word")
STORE = line_of("cp_async_bulk_global_shared(")
ANNOUNCE = line_of("else mbarrier_arrive_expect_tx")
RELEASE = line_of("mbarrier_arrive(empty")
CONSUMERS = f"waiting: CTA 0 threads 0-63 at {FULL_WAIT}"
PRODUCER = f"waiting: CTA 0 thread 64 at {EMPTY_WAIT}"
UNTOUCHED = "nobody ever arrived at it or announced bytes"
REFILL_HANGS = (
    "empty[0] of CTA 0, phase 0 (parity 0): no bytes announced, 2 of 2 arrivals missing; "
    f"{UNTOUCHED}; {PRODUCER}"
)

HANGS = {
    Fault.BYTES_SHORT: [
        "full[0] of CTA 0, phase 0 (parity 0): 16 bytes more than the 496 announced have arrived, "
        f"0 of 1 arrivals missing; {CONSUMERS}",
        REFILL_HANGS,
    ],
    Fault.BYTES_OVER: [
        "full[0] of CTA 0, phase 0 (parity 0): 16 of 528 bytes missing, 0 of 1 arrivals missing; "
        + CONSUMERS,
        REFILL_HANGS,
    ],
    Fault.LOAD_MISSING: [  # A03
        "full[0] of CTA 0, phase 3 (parity 1): 512 of 512 bytes missing, 0 of 1 arrivals missing; "
        + CONSUMERS,
    ],
    Fault.ARRIVE_MISSING: [
        f"full[0] of CTA 0, phase 0 (parity 0): 0 of 512 bytes missing, 1 of 1 arrivals missing; {CONSUMERS}",
        REFILL_HANGS,
    ],
    Fault.PRODUCER_NOT_REACHED: [  # A25
        "full[0] of CTA 0, phase 0 (parity 0): no bytes announced, 1 of 1 arrivals missing; "
        f"{UNTOUCHED}; {CONSUMERS}",
    ],
    Fault.PRODUCER_LEAVES_EARLY: [
        f"full[0] of CTA 0, phase 3 (parity 1): no bytes announced, 1 of 1 arrivals missing; {CONSUMERS}",
    ],
    Fault.ARRIVALS_SHORT: [
        f"full[0] of CTA 0, phase 1 (parity 1): no bytes announced, 1 of 1 arrivals missing; {CONSUMERS}",
        f"empty[0] of CTA 0, phase 0 (parity 0): no bytes announced, 1 of 3 arrivals missing; {PRODUCER}",
    ],
    Fault.RELEASE_MISSING: [
        f"full[0] of CTA 0, phase 1 (parity 1): no bytes announced, 1 of 1 arrivals missing; {CONSUMERS}",
        REFILL_HANGS,
    ],
}

OVERFLOW = ("more arrivals than phase",)
EARLY = ("arrival in phase 1 before any successful wait on phase 0",)
READS_IN_FLIGHT = ("reads the destination of the cp.async.bulk load", "which is not complete")
STORES_IN_FLIGHT = (
    "cp.async.bulk store reads",
    "the destination of the cp.async.bulk load",
    "is not complete",
)
OVERWRITES = ("overwrites the source of the cp.async.bulk store", "which has not been read yet")
NOT_INITIALISED = ("no barrier has been initialised at this shared address", "bytes nobody has written")
UNWRITTEN = ("reads 4 bytes nobody has written", "at CTA 0 thread")
STUCK = ("deadlock", "full[0] of CTA 0, phase 2 (parity 0): no bytes announced, 1 of 1 arrivals missing")

# Per schedule ("any": all that are not named) the ways in which the fault may show; each way is its phrases.
BREAKS: dict[Fault, dict[str, list[tuple[str, ...]]]] = {
    Fault.ARRIVALS_OVER: {
        "any": [(*OVERFLOW, "phase 0 expects: 2 by 2 lanes at once, 1 of 1 pending", RELEASE)],
        "random": [OVERFLOW, EARLY, STORES_IN_FLIGHT, READS_IN_FLIGHT],
    },
    # A15
    Fault.EVERY_LANE_RELEASES: {"any": [(*OVERFLOW, "lanes at once, 2 of 2 pending", RELEASE)]},
    # A08
    Fault.INIT_MISSING: {"any": [(*NOT_INITIALISED, "mbarrier at shared+0x0 (full[0] of CTA 0)", FULL_WAIT)]},
    # A09
    Fault.INIT_NOT_SYNCED: {"any": [PASSES], "random": [NOT_INITIALISED, PASSES]},
    Fault.FULL_NOT_AWAITED: {"any": [(*UNWRITTEN, READ)]},
    Fault.EMPTY_NOT_AWAITED: {
        "any": [(*OVERFLOW, "phase 0 expects: 1, 0 of 1 pending", ANNOUNCE)],
        "async-earliest": [(*EARLY, RELEASE)],
        "random": [(*OVERFLOW, ANNOUNCE), (*EARLY, RELEASE), (*OVERWRITES, LOAD)],
    },
    Fault.WRONG_BARRIER: {"any": [(*READS_IN_FLIGHT, LOAD, READ)]},
    Fault.PARITY_NOT_FLIPPED: {
        "any": [(*READS_IN_FLIGHT, LOAD, READ)],
        "async-earliest": [(*EARLY, RELEASE)],
        "async-latest": [(*EARLY, RELEASE)],
        "random": [(*READS_IN_FLIGHT, LOAD, READ), (*EARLY, RELEASE), STUCK],
    },
    Fault.COMMIT_AFTER_WAIT: {  # B16
        "any": [(*OVERWRITES, LOAD, STORE)],
        "async-earliest": [PASSES],  # the store has always read its source before anyone looks
        "random": [(*OVERWRITES, LOAD, STORE), PASSES],
    },
}


def run(
    config: FaultConfig,
    schedule: str,
    seed: int,
    *,
    spec: str = "emu:h100",
    tiles: int = TILES,
    grid: int = 1,
) -> str:
    """The emulated GPU's report, PASSES when the run ends with the right result."""
    with Device.open(spec, schedule=schedule, seed=seed) as device:
        data = np.random.default_rng(5).integers(0, 1 << 32, tiles * config.tile_bytes // 4, dtype=np.uint32)
        src, dst = device.asarray(data), device.asarray(np.zeros_like(data))
        scale(dst, src, config=config, grid=grid)
        try:
            device.synchronize()
        except KernelFaultError:
            return str(device.driver.report())
        assert np.array_equal(dst.numpy(), 2 * data), "wrong data, and no report"
        return PASSES[0]


def barrier_lines(report: str) -> list[str]:
    """The lines of a deadlock report that name mbarriers, without PTX lines and the header's."""
    assert "deadlock" in report, report
    lines = [line for line in report.splitlines() if re.match(r"\w+\[\d+\] of CTA", line)]
    return [re.sub(r" \(inlined from [^)]*\)| \(PTX line \d+\)", "", line) for line in lines]


@pytest.mark.parametrize(("config", "faults"), [(FaultConfig(), Fault), (ClusterFaultConfig(), ClusterFault)])
def test_the_kernel_and_its_wrapper_know_the_same_faults(config: Any, faults: type[Enum]) -> None:
    listed = re.search(r"enum Fault \{(.*?)\};", config.source.read().decode(), re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"\w+", listed[1])) == set(faults.__members__)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"warps": 1}, "warps must be 2 to 31, beside the producer's (got 1); use 4"),
        ({"tile_bytes": 640}, "tile_bytes must be a positive multiple of 256 (got 640); use 512 or 768"),
        ({"num_stages": 1}, "num_stages must be at least 2 (got 1); use 2"),
        ({"fault": "NONE"}, "fault must be a Fault (got NONE); use Fault.NONE"),
    ],
)
def test_a_ring_that_cannot_be_is_refused(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(rule)}$"):
        FaultConfig(**fields)


def test_operands_that_are_no_whole_tiles_are_refused() -> None:
    with Device.open("emu:h100") as device:
        src, dst = (device.asarray(np.zeros(300, np.uint32)) for _ in range(2))
        with pytest.raises(
            OperandError, match=r"src must hold whole tiles of uint32 .got 1200 bytes of uint32"
        ):
            scale(dst, src, config=FaultConfig())
        with pytest.raises(ConfigError, match=r"grid must be 1 CTA to one per tile .got 3.; use at most 2"):
            scale(dst[:256], src[:256], config=FaultConfig(), grid=3)
    with Device.open("emu:a100") as device:
        src, dst = (device.asarray(np.zeros(128, np.uint32)) for _ in range(2))
        with pytest.raises(ConfigError, match="needs the TMA"):
            scale(dst, src, config=FaultConfig())


def test_every_fault_has_its_expected_report() -> None:
    assert set(HANGS) == {fault for fault in Fault if fault.ending is Ending.HANGS}
    assert set(BREAKS) == {fault for fault in Fault if fault.ending is Ending.BREAKS}


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("fault", HANGS, ids=lambda fault: fault.name)
def test_a_hang_names_barrier_phase_bytes_arrivals_threads_and_line(
    fault: Fault, schedule: str, seed: int
) -> None:
    report = run(FaultConfig(fault=fault), schedule, seed)
    assert barrier_lines(report) == HANGS[fault]


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("fault", BREAKS, ids=lambda fault: fault.name)
def test_a_broken_rule_is_reported_where_the_schedule_meets_it(
    fault: Fault, schedule: str, seed: int
) -> None:
    report = run(FaultConfig(fault=fault), schedule, seed)
    ways = BREAKS[fault].get(schedule, BREAKS[fault]["any"])
    assert any(all(phrase in report for phrase in way) for way in ways), report


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize(
    ("tiles", "grid", "stages"), [(1, 1, 2), (2, 2, 2), (TILES, 1, 2), (23, 3, 5), (17, 2, 8)]
)
def test_the_correct_twin_is_clean(tiles: int, grid: int, stages: int, schedule: str, seed: int) -> None:
    config = FaultConfig(num_stages=stages)
    assert run(config, schedule, seed, tiles=tiles, grid=grid) == PASSES[0]


@pytest.mark.parametrize("fault", HANGS, ids=lambda fault: fault.name)
def test_a_hang_reads_the_same_on_a_b200(fault: Fault) -> None:
    assert barrier_lines(run(FaultConfig(fault=fault), "timed", 0, spec="emu:b200")) == HANGS[fault]
    assert run(FaultConfig(), "timed", 0, spec="emu:b200") == PASSES[0]


def test_every_hanging_cta_is_named() -> None:
    """Three CTAs with two, two and one tile to go: each waits for the last of its own."""
    report = run(FaultConfig(fault=Fault.LOAD_MISSING, num_stages=3, warps=4), "timed", 0, tiles=23, grid=3)
    assert barrier_lines(report) == [
        f"full[{stage}] of CTA {cta}, phase 2 (parity 0): 512 of 512 bytes missing, 0 of 1 arrivals missing; "
        f"waiting: CTA {cta} threads 0-127 at {FULL_WAIT}"
        for cta, stage in [(0, 1), (1, 1), (2, 0)]
    ]
