"""What is particular to the warp-specialised and the persistent pipeline. That they are right for every
length, depth, half and schedule: test_pipelines.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.mbarrier import persistent, specialised
from kernels.mbarrier.counter import counter_of
from kernels.mbarrier.persistent import PersistentConfig
from kernels.mbarrier.pipeline import Part
from kernels.mbarrier.registry import PIPELINES
from kernels.mbarrier.specialised import SpecialisedConfig
from smfree.cuda import Device, compile_cuda
from tests.kernels.mutant_kit import mutated, reported
from tests.kernels.pairwise import SCHEDULES
from tests.kernels.test_pipelines import ALPHA, TILE, expected, operands

SPECIALISED = [
    SpecialisedConfig(4096, 2),
    SpecialisedConfig(4096, 2, 256),
    SpecialisedConfig(4096, 2, 512),
    SpecialisedConfig(4096, 2, 1024, producer_registers=24),
    SpecialisedConfig(4096, 2, ctas_per_sm=2),
    SpecialisedConfig(4096, 2, producer_registers=24, consumer_registers=160),
]
WRONG = [
    (SpecialisedConfig, {"threads": 128}, r"whole warpgroups of 128, a producer and .* \(got 128\); use 384"),
    (SpecialisedConfig, {"threads": 416}, r"whole warpgroups of 128, .* \(got 416\)"),
    (
        SpecialisedConfig,
        {"producer_registers": 48, "consumer_registers": 232},
        r"pool holds 64512 registers, 168 for each thread at launch "
        r"\(got 65536: producer 128 x 48 \+ consumer 256 x 232\); give",
    ),
    (SpecialisedConfig, {"producer_registers": 36}, r"producer registers .* multiple of 8, .*\(got 36\)"),
    (SpecialisedConfig, {"producer_registers": 16}, r"producer registers .* 24 to 256 \(got 16\)"),
    (SpecialisedConfig, {"consumer_registers": 264}, r"consumer registers .* 24 to 256 \(got 264\)"),
    (
        SpecialisedConfig,
        {"producer_registers": 232, "consumer_registers": 40},
        r"the producers give registers to the consumers, .*\(got producer 232, consumer 40\)",
    ),
    (
        SpecialisedConfig,
        {"producer_registers": 0, "consumer_registers": 40},
        r"without setmaxnreg all threads have the same .*\(got consumer_registers=40\); leave it out",
    ),
    (SpecialisedConfig, {"empty_arrivals": 1}, r"empty\[\] completes with 2 arrivals: 2 of consumer group"),
    (SpecialisedConfig, {"full_tx_bytes": 4096}, r"full\[\] .* 8192 bytes: 4096 of x \+ 4096 of y"),
    (PersistentConfig, {"batch_tiles": 0}, r"batch_tiles is 1 to 1024 \(got 0\); use 1"),
    (PersistentConfig, {"threads": 32}, r"threads must be at least 64: .*\(got 32\)"),
    (PersistentConfig, {"empty_arrivals": 4}, r"empty\[\] completes with 1 arrivals: 1 of storing thread"),
]


@pytest.mark.parametrize(("kind", "wrong", "rule"), WRONG, ids=[f"{k.__name__}-{w}" for k, w, _ in WRONG])
def test_a_wrong_configuration_is_refused_before_compiling(
    kind: Any, wrong: dict[str, Any], rule: str
) -> None:
    kind(4096, 2)
    with pytest.raises(ConfigError, match=rule):
        kind(4096, 2, **wrong)


def test_a_count_of_tiles_that_the_slots_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "MAX_TILES", 3)
    with Device.open("emu:h100") as device:
        run_on(device, "persistent", PersistentConfig(4 * TILE, 1), 3 * TILE)
        with pytest.raises(OperandError, match=r"numbered below 3 \(got 4\); use larger tiles"):
            run_on(device, "persistent", PersistentConfig(4 * TILE, 1), 4 * TILE)


# ---- registers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("config", SPECIALISED, ids=str)
def test_ptxas_launches_the_registers_that_the_budget_counts_on(config: SpecialisedConfig, arch: str) -> None:
    image = compile_cuda(config.source, arch)
    (facts,) = image.functions.values()
    assert config.registers is not None
    assert facts.registers == config.registers.launch_registers
    assert image.sass().stems()["USETMAXREG"] == 2
    assert f"setmaxnreg.dec.sync.aligned.u32 {config.producer_registers};" in image.ptx
    assert f"setmaxnreg.inc.sync.aligned.u32 {config.consumer_registers};" in image.ptx


def test_consumers_get_by_default_what_the_producers_leave() -> None:
    found = [(config.producer_registers, config.consumer_registers) for config in SPECIALISED]
    assert found == [(40, 232), (40, 240), (40, 152), (24, 64), (40, 96), (24, 160)]


def test_without_setmaxnreg_it_compiles_for_sm_90_too() -> None:
    image = compile_cuda(SpecialisedConfig(4096, 2, producer_registers=0).source, "sm_90")
    assert "setmaxnreg" not in image.ptx and "USETMAXREG" not in image.sass().stems()


@pytest.mark.parametrize("spec", ["emu:h100", "emu:b200"])
@pytest.mark.parametrize("threads", [256, 384, 512])
@pytest.mark.parametrize("registers", [0, 40])
def test_any_number_of_consumer_groups_shares_the_tiles(threads: int, registers: int, spec: str) -> None:
    """A tile of 5 units of 16 bytes: the groups' shares differ, the last one may have none."""
    for schedule, seed in (("timed", 0), ("random", 1)):
        with Device.open(spec, schedule=schedule, seed=seed) as device:
            config = SpecialisedConfig(80, 3, threads, work=2, max_ctas=2, producer_registers=registers)
            run_on(device, "specialised", config, 20 * 23 + 2)


def test_consumers_wait_for_ever_for_registers_that_the_producers_keep() -> None:
    config = SpecialisedConfig(4096, 2)
    keeps = mutated(
        config, ("if constexpr (PRODUCER_REGISTERS != 0) setmaxnreg_dec<PRODUCER_REGISTERS>();", "")
    )
    words = (
        "registers of CTA 0: 16384 of 16384 registers missing, the pool holds 0",
        "threads 128-383 at spec",
    )
    with Device.open("emu:h100") as device, reported(*words):
        run_on(device, "specialised", keeps, 5000)
    with Device.open("emu:h100") as device:
        run_on(device, "specialised", config, 5000)


# ---- the ring ----------------------------------------------------------------------------------------

OTHER = {"timed": "async-latest: ", "async-latest": "timed: "}
BROKEN = {
    "specialised: one group alone may release a stage": (
        SpecialisedConfig(4 * TILE, 1, max_ctas=2),
        ("mbarrier_init(empty_at(s), EMPTY_ARRIVALS)", "mbarrier_init(empty_at(s), 1)"),
        ("more arrivals than phase 0 expects", "1 of 1 pending", "specialised.cu"),
    ),
    "specialised: a stage is released before its store has read it": (
        SpecialisedConfig(4 * TILE, 1, max_ctas=2),
        ("cp_async_bulk_wait_group_read<STORES_IN_FLIGHT>();", ""),
        ("overwrites the source of the cp.async.bulk store", "specialised.cu"),
    ),
    "specialised: the last stores outlive the CTA": (
        SpecialisedConfig(4 * TILE, 4, max_ctas=2),
        ("if (stores) cp_async_bulk_wait_group<0>();", ""),
        ("mbarrier_specialised",),
    ),
    "persistent: the producer starts the ring anew for each batch": (
        PersistentConfig(4 * TILE, 3, batch_tiles=2, max_ctas=2),
        ("if (batch >= num_batches) break;", "if (batch >= num_batches) break;\n    ring = Ring();"),
        (
            "timed: overwrites the source of the cp.async.bulk store",
            "async-latest: more arrivals than phase 0",
        ),
    ),
    "persistent: the consumers are not told that no tile is left": (
        PersistentConfig(4 * TILE, 2, max_ctas=2),
        ("  mbarrier_arrive(full_at(ring.s));\n", ""),
        ("no bytes announced, 1 of 1 arrivals missing", "threads 32-159"),
    ),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_ring_is_reported_and_its_twin_is_clean(name: str) -> None:
    config, replacement, words = BROKEN[name]
    for schedule in ("timed", "async-latest"):
        wanted = [
            word.removeprefix(f"{schedule}: ") for word in words if not word.startswith(OTHER[schedule])
        ]
        with Device.open("emu:h100", schedule=schedule) as device, reported(*wanted):
            run_on(device, name.split(":")[0], mutated(config, replacement), 19 * TILE)
        with Device.open("emu:h100", schedule=schedule) as device:
            run_on(device, name.split(":")[0], config, 19 * TILE)


# ---- the counter -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("batch_tiles", [1, 3])
def test_the_counter_is_zero_again_and_each_batch_is_taken_once(
    batch_tiles: int, schedule: str, seed: int
) -> None:
    """Three launches share a counter; atomics are batches plus one per CTA that finds none."""
    config = PersistentConfig(4 * TILE, 2, 96, max_ctas=3, batch_tiles=batch_tiles)
    with Device.open("emu:h100", schedule=schedule, seed=seed) as device:
        for tiles in (1, 7, 24):
            grid = run_on(device, "persistent", config, tiles * TILE - 5)
            batches = -(-tiles // batch_tiles)
            assert grid == min(3, batches)
            assert device.emulator.last_launch.counters.atomics == batches + grid
            assert counter_of(device, None).numpy().tolist() == [0]


def test_a_counter_that_wraps_one_too_late_leaves_the_next_launch_without_work() -> None:
    config = PersistentConfig(4 * TILE, 2, 96, max_ctas=1)
    late = mutated(config, ("num_batches + gridDim.x - 1", "num_batches + gridDim.x"))
    with Device.open("emu:h100") as device:
        run_on(device, "persistent", late, 7 * TILE)
        assert counter_of(device, None).numpy().tolist() == [8]
        with pytest.raises(AssertionError, match="Mismatched elements: 1792 / 1792"):
            run_on(device, "persistent", config, 7 * TILE)


def test_streams_have_counters_of_their_own() -> None:
    with Device.open("emu:h100") as device:
        streams = [None, device.stream(), device.stream(non_blocking=True)]
        counters = [counter_of(device, stream) for stream in streams]
        assert len({counter.ptr for counter in counters}) == 3
        assert [counter_of(device, stream).ptr for stream in streams] == [c.ptr for c in counters]
    with Device.open("emu:h100") as again:
        assert counter_of(again, None).numpy().tolist() == [0]


def test_the_ring_does_not_drain_between_batches() -> None:
    """Where batches end does not show in modelled time. To empty the ring there would take 1.5 x as long."""
    whole, pairs = (PersistentConfig(4096, 4, max_ctas=1, batch_tiles=tiles) for tiles in (48, 2))
    load = "      load_tile(ring.s, x, y, tile, bulk_bytes);\n"
    before = "(ring.s + NUM_STAGES - 1) % NUM_STAGES"
    parity = "ring.s == 0 ? ring.phase ^ 1 : ring.phase"
    drains = mutated(
        pairs, (load, f"{load}      if (tile + 1 == end) wait_parity(empty_at({before}), {parity});\n")
    )
    at_once, in_pairs, drained = (modelled_us(config, 48 * 1024) for config in (whole, pairs, drains))
    assert in_pairs < 1.01 * at_once
    assert drained > 1.5 * at_once


def modelled_us(config: Any, elements: int) -> float:
    """The second of two launches, with everything in L2."""
    with Device.open("emu:h100") as device:
        run_on(device, "persistent", config, elements)
        x, dst = device.asarray(np.ones(elements, np.float32)), device.empty(elements, np.float32)
        before = device.default_stream.record()
        persistent.axpy(dst, x, x, alpha=1.0, config=config)
        after = device.default_stream.record()
        device.synchronize()
        return after.elapsed_us(before)


# ---- what passes where -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["specialised", "persistent"])
def test_no_byte_but_the_tail_passes_through_registers(name: str) -> None:
    for elements in (4 * TILE, 5 * TILE + 3, 2):
        with Device.open("emu:h100") as device:
            run_on(device, name, PIPELINES[name].config(4 * TILE, 2, max_ctas=2), elements)
            counters = device.emulator.last_launch.counters
        tail = 4 * (elements % 4)
        assert counters.bytes_through_registers == 3 * tail
        assert counters.bytes_async == 3 * (4 * elements - tail)


@pytest.mark.parametrize("name", ["specialised", "persistent"])
def test_the_halves_do_their_half_and_arrive_alike(name: str) -> None:
    found = {}
    for part in Part:
        with Device.open("emu:h100") as device:
            config = PIPELINES[name].config(4 * TILE, 2, work=50, part=part, max_ctas=2)
            run_on(device, name, config, 8 * TILE)
            found[part] = device.emulator.last_launch.counters
    both, copy, compute = (found[part] for part in Part)
    assert (compute.bytes_async, compute.bytes_through_registers, compute.tma_requests) == (0, 0, 0)
    assert (copy.bytes_async, copy.tma_requests) == (both.bytes_async, both.tma_requests)
    assert copy.thread_instructions < 8 * TILE * 50 < compute.thread_instructions
    assert copy.mbarrier_arrivals == compute.mbarrier_arrivals == both.mbarrier_arrivals > 0


def run_on(device: Device, name: str, config: Any, elements: int) -> int:
    """Run it, compare, and give the grid."""
    x, y = operands(elements, seed=elements)
    dst = device.asarray(np.full(elements, 7.5, np.float32))
    module = {"specialised": specialised, "persistent": persistent}[name]
    info = module.axpy(dst, device.asarray(x), device.asarray(y), alpha=ALPHA, config=config)
    device.synchronize()
    result = {Part.BOTH: expected(x, y, config.work), Part.COPY: y}.get(config.part)
    wanted = np.full(elements, 7.5, np.float32) if result is None else result
    np.testing.assert_array_equal(dst.numpy().view(np.uint32), wanted.view(np.uint32))
    return info.grid
