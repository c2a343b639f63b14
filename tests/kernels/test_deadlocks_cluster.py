"""Mistakes between the CTAs of a cluster: the emulated GPU's report for each, and a clean twin."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.mbarrier.faults import Ending
from kernels.mbarrier.faults_cluster import ClusterFault, ClusterFaultConfig, scale
from kernels.watchdog import WatchedDevice, new_log, read_log
from smfree.cuda import Device, KernelFaultError
from tests.kernels.pairwise import SCHEDULES
from tests.kernels.test_deadlocks import PASSES, barrier_lines

TILES = 7
SOURCE = ClusterFaultConfig().source


def line_of(text: str) -> str:
    """ "faults_cluster.cu:72" for the only line that contains ``text``."""
    (number,) = (i for i, line in enumerate(SOURCE.read().decode().splitlines(), 1) if text in line)
    return f"faults_cluster.cu:{number}"


FULL_WAIT = line_of("else wait_parity_cluster(full_at(s), phase);")
EMPTY_WAIT = line_of("wait_parity_cluster(empty_at(s), phase ^ 1);")
FULL_1 = (
    "full[0] of CTA 1, phase 1 (parity 1): no bytes announced, 2 of 2 arrivals missing; "
    f"waiting: CTA 1 threads 0-63 at {FULL_WAIT}"
)
HANGS = {
    ClusterFault.RELEASED_TO_ITSELF: [  # A07, the reverse: released locally only
        "empty[0] of CTA 0, phase 0 (parity 0): no bytes announced, 2 of 2 arrivals missing; "
        "nobody ever arrived at it or announced bytes; "
        f"waiting: CTA 0 threads 0-63 at {EMPTY_WAIT}",
        FULL_1,
    ],
    ClusterFault.ARRIVALS_OF_TWO: [
        "empty[0] of CTA 0, phase 0 (parity 0): no bytes announced, 2 of 4 arrivals missing "
        f"(arrived: CTA 1); waiting: CTA 0 threads 0-63 at {EMPTY_WAIT}",
        FULL_1,
    ],
}
ARRIVES = line_of("else mbarrier_arrive_shared_cluster(")
EXITED = ("CTA 1 touches the shared memory of CTA 0, which has exited", ARRIVES)

# Under which schedules the fault shows (None: all), and what the report says.
BREAKS: dict[ClusterFault, tuple[str | None, tuple[str, ...]]] = {
    ClusterFault.INIT_FENCE_MISSING: (  # A27
        None,
        (
            "CTA 0 uses an mbarrier at shared+0x800 (full[0] of CTA 1), which CTA 1 thread 0 initialised "
            "without making that visible to the cluster",
            "must execute fence.mbarrier_init.release.cluster",
            ARRIVES,
        ),
    ),
    ClusterFault.ENTRY_BARRIER_MISSING: (  # A20
        None,
        (
            "CTA 0 touches the shared memory of CTA 1 before anything has proven that it has started",
            line_of("st_shared_cluster("),
        ),
    ),
    ClusterFault.EXIT_BARRIER_MISSING: ("random", EXITED),  # A17; elsewhere the arrivals come in time
    ClusterFault.SCOPE_TOO_NARROW: (
        None,
        (
            "a wait with scope .cta (the default) on an mbarrier at shared+0x800 (full[0] of CTA 1), at "
            "which other CTAs arrived",
            "write .acquire.cluster",
            line_of(" wait_parity(full_at(s), phase);"),
        ),
    ),
    ClusterFault.ADDRESS_TAKEN_FOR_OWN: (  # A23
        None,
        (
            "address belongs to CTA 1 of the cluster (rank 1), CTA 0 executes; needs .shared::cluster",
            line_of(" mbarrier_arrive(mapa_shared_cluster("),
        ),
    ),
}


def run_on(device: Device, config: ClusterFaultConfig, tiles: int, clusters: int) -> bool:
    data = np.random.default_rng(5).integers(0, 1 << 32, tiles * config.tile_bytes // 4, dtype=np.uint32)
    src, dst = device.asarray(data), device.asarray(np.zeros_like(data))
    scale(dst, src, config=config, clusters=clusters)
    device.synchronize()
    return bool(np.array_equal(dst.numpy(), 2 * data))


def run(config: ClusterFaultConfig, schedule: str, seed: int, tiles: int = TILES, clusters: int = 1) -> str:
    """The emulated GPU's report, PASSES when the run ends with the right result."""
    with Device.open("emu:h100", schedule=schedule, seed=seed) as device:
        try:
            assert run_on(device, config, tiles, clusters), "wrong data, and no report"
        except KernelFaultError:
            return str(device.driver.report())
        return PASSES[0]


def test_every_fault_has_its_expected_report() -> None:
    assert set(HANGS) == {fault for fault in ClusterFault if fault.ending is Ending.HANGS}
    assert set(BREAKS) == {fault for fault in ClusterFault if fault.ending is Ending.BREAKS}


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("fault", HANGS, ids=lambda fault: fault.name)
def test_a_hang_names_both_ctas_and_who_has_arrived(fault: ClusterFault, schedule: str, seed: int) -> None:
    assert barrier_lines(run(ClusterFaultConfig(fault=fault), schedule, seed)) == HANGS[fault]


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("fault", BREAKS, ids=lambda fault: fault.name)
def test_a_broken_rule_names_both_ctas(fault: ClusterFault, schedule: str, seed: int) -> None:
    only, phrases = BREAKS[fault]
    report = run(ClusterFaultConfig(fault=fault), schedule, seed)
    if only not in (None, schedule):
        assert report == PASSES[0]
        return
    missing = [phrase for phrase in phrases if phrase not in report]
    assert not missing, report


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize(
    ("tiles", "clusters", "stages", "warps"), [(1, 1, 1, 1), (TILES, 1, 2, 2), (5, 5, 2, 1), (23, 3, 4, 2)]
)
def test_the_correct_twin_is_clean(
    tiles: int, clusters: int, stages: int, warps: int, schedule: str, seed: int
) -> None:
    config = ClusterFaultConfig(num_stages=stages, warps=warps)
    assert run(config, schedule, seed, tiles, clusters) == PASSES[0]


def test_bounded_waits_record_hangs_of_both_ctas() -> None:
    log = new_log()
    with WatchedDevice("emu:h100", log) as device:
        assert not run_on(device, ClusterFaultConfig(fault=ClusterFault.RELEASED_TO_ITSELF), TILES, 1)
        assert run_on(device, ClusterFaultConfig(), TILES, 1)
    waits, dropped = read_log(log)
    found = [(wait.barrier, wait.cta, wait.parity, f"{wait.source}:{wait.line}") for wait in waits]
    assert found == [("empty[0]", 0, 0, EMPTY_WAIT), ("full[0]", 1, 1, FULL_WAIT)] and dropped == 0
    assert all(wait.threads == tuple(range(64)) for wait in waits)
