"""What a pipeline's barriers need follows from roles and copies; what contradicts them is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.mbarrier.phases import PhasesConfig
from kernels.mbarrier.pingpong import PingpongConfig
from kernels.mbarrier.pipeline import Part, PipelineConfig, RegisterPlan
from kernels.mbarrier.registry import PIPELINES, pipeline
from kernels.mbarrier.ring import RingConfig
from kernels.mbarrier.ring_async import RingAsyncConfig
from kernels.staged import BarrierPlan
from smfree.cuda import CompileCache, Device


def plans(config: PipelineConfig) -> dict[str, tuple[int, int]]:
    """Arrivals and bytes of each barrier."""
    return {plan.name: (plan.arrivals, plan.tx_bytes) for plan in config.barriers}


def test_counts_and_bytes_follow_from_roles_and_copies() -> None:
    assert plans(PingpongConfig(4096, 2, 256)) == {"full": (1, 8192)}
    assert plans(RingConfig(2048, 5, 256)) == {"full": (1, 4096), "empty": (7, 0)}
    assert plans(RingAsyncConfig(2048, 5, 256)) == {"full": (32, 0), "empty": (224, 0)}


def test_computing_alone_waits_for_no_bytes_and_copying_alone_for_all() -> None:
    assert plans(RingConfig(2048, 5, 160, part=Part.COMPUTE)) == {"full": (1, 0), "empty": (4, 0)}
    assert plans(RingConfig(2048, 5, 160, part=Part.COPY)) == {"full": (1, 4096), "empty": (4, 0)}


def test_the_derived_numbers_are_what_the_kernel_is_compiled_with() -> None:
    config = RingConfig(1040, 3, 96, work=7, part=Part.COPY)
    assert dict(config.source.defines) == {
        "TILE_BYTES": "1040",
        "NUM_STAGES": "3",
        "STAGE_BYTES": "2176",
        "STAGE_ALIGN": "128",
        "THREADS": "96",
        "WORK": "7",
        "PART": "COPY",
        "FULL_ARRIVALS": "1",
        "FULL_TX_BYTES": "2080",
        "EMPTY_ARRIVALS": "2",
    }


def test_shared_memory_holds_the_stages_and_the_barriers_before_them() -> None:
    config = RingConfig(1040, 8, 96)
    assert config.stage_bytes == 2176, "two tiles, padded to 128 bytes"
    assert (config.shared_bytes, config.static_shared_bytes) == (8 * 2176, 128)
    assert config.bytes_in_flight_per_cta == 8 * 2080
    with Device.open("emu:h100") as device:
        facts = device.compile(config.source).kernel().facts
    assert facts.static_shared_bytes <= config.static_shared_bytes


def test_ping_pong_has_one_tile_of_each_in_flight_whatever_its_buffers() -> None:
    assert [PingpongConfig(4096, n).bytes_in_flight_per_cta for n in (1, 2)] == [8192, 8192]


STATED: list[tuple[Callable[..., PipelineConfig], dict[str, Any], str]] = [
    (
        PingpongConfig,
        {"full_tx_bytes": 4096},
        r"a phase of full\[\] completes with 8192 bytes: 4096 of x \+ 4096 of y \(got full_tx_bytes=4096\); "
        r"leave full_tx_bytes out to have it derived",
    ),
    (
        PingpongConfig,
        {"full_arrivals": 128},
        r"a phase of full\[\] completes with 1 arrivals: 1 of asking thread \(got full_arrivals=128\)",
    ),
    (
        RingConfig,
        {"empty_arrivals": 2},
        r"a phase of empty\[\] completes with 3 arrivals: 3 of consumer warps \(got empty_arrivals=2\)",
    ),
    (RingConfig, {"full_tx_bytes": 0}, r"full\[\] completes with 8192 bytes.* \(got full_tx_bytes=0\)"),
    (
        RingConfig,
        {"full_tx_bytes": 8192, "part": Part.COMPUTE},
        r"a phase of full\[\] completes with 0 bytes: nothing completes on it \(got full_tx_bytes=8192\)",
    ),
    (
        RingAsyncConfig,
        {"full_arrivals": 1},
        r"a phase of full\[\] completes with 32 arrivals: 32 of loading lanes \(got full_arrivals=1\)",
    ),
    (
        RingAsyncConfig,
        {"full_tx_bytes": 8192},
        r"a phase of full\[\] completes with 0 bytes: nothing completes on it",
    ),
    (
        RingAsyncConfig,
        {"empty_arrivals": 3},
        r"a phase of empty\[\] completes with 96 arrivals: 96 of consumer threads \(got empty_arrivals=3\)",
    ),
    (
        PingpongConfig,
        {"empty_arrivals": 4},
        r"pingpong.cu has barriers full\[\] \(got empty_arrivals=4\); leave it out",
    ),
]


@pytest.mark.parametrize(("kind", "stated", "message"), STATED)
def test_a_number_that_contradicts_roles_and_copies_is_refused_before_compiling(
    kind: Callable[..., PipelineConfig], stated: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(4096, 2, 128, **stated)


@pytest.mark.parametrize(
    "config",
    [
        PingpongConfig(4096, 2, 128, full_arrivals=1, full_tx_bytes=8192),
        RingConfig(4096, 2, 128, full_arrivals=1, full_tx_bytes=8192, empty_arrivals=3),
        RingAsyncConfig(4096, 2, 128, full_arrivals=32, empty_arrivals=96),
    ],
)
def test_a_number_that_agrees_changes_nothing(config: PipelineConfig) -> None:
    plain = type(config)(4096, 2, 128)
    assert (config.source, config.barriers) == (plain.source, plain.barriers)


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: PingpongConfig(num_stages=3), r"num_stages must be 1 to 2 \(got 3\)"),
    (lambda: RingConfig(num_stages=9), r"num_stages must be 1 to 8 \(got 9\)"),
    (lambda: RingConfig(threads=32), r"threads must be at least 64: .* \(got 32\); use 160"),
    (lambda: RingAsyncConfig(threads=100), r"threads must be a multiple of 32.* \(got 100\)"),
    (lambda: RingConfig(tile_bytes=24), r"tile_bytes must be a positive multiple of 16 \(got 24\)"),
    (lambda: RingConfig(work=-1), r"work must be 0 to 4096 FMAs \(got -1\)"),
    (lambda: RingConfig(work=1.5), r"work must be a whole number \(got 1.5\)"),  # type: ignore[arg-type]
    (lambda: RingConfig(part="half"), r"part must be one of both, copy, compute \(got half\)"),  # type: ignore[arg-type]
    (lambda: RingConfig(max_ctas=0), r"max_ctas must be at least 1 \(got 0\)"),
    (lambda: RingConfig(ctas_per_sm=0), r"ctas_per_sm must be at least 1 \(got 0\)"),
    (
        lambda: RingConfig(tile_bytes=2**19),
        r"a phase of full\[\] has 0 to 1048575 bytes \(got 1048576: 524288 of x \+ 524288 of y\); "
        r"use a smaller tile",
    ),
    (
        lambda: BarrierPlan("empty", {}),
        r"a phase of empty\[\] has 1 to 1048575 arrivals \(got 0: nothing completes on it\)",
    ),
    (lambda: PhasesConfig(turns=7), r"turns must be even"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_what_no_kernel_can_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


REGISTERS: list[tuple[int, dict[str, tuple[int, int]], str]] = [
    (
        168,
        {"producer": (128, 40), "consumer": (256, 240)},
        r"holds 64512 registers, 168 .*\(got 66560: producer",
    ),
    (168, {"producer": (96, 40), "consumer": (288, 232)}, r"whole warpgroups of producer threads \(got 96\)"),
    (168, {"producer": (128, 20), "consumer": (256, 232)}, r"producer registers must be a multiple of 8, 24"),
    (168, {"producer": (128, 44), "consumer": (256, 232)}, r"producer registers .* \(got 44\)"),
]


@pytest.mark.parametrize(("launched", "roles", "message"), REGISTERS)
def test_registers_above_the_ctas_pool_are_refused(
    launched: int, roles: dict[str, tuple[int, int]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RegisterPlan(launched, roles)


def test_registers_that_fit_the_pool_are_what_the_kernel_is_compiled_with() -> None:
    plan = RegisterPlan.of(65536, {"producer": (128, 40), "consumer": (256, 232)})
    assert (plan.launch_registers, plan.pool) == (168, 64512)
    assert plan.defines == {"PRODUCER_REGISTERS": 40, "CONSUMER_REGISTERS": 232}


@pytest.mark.parametrize("name", ["pingpong", "ring", "ring_async"])
def test_stages_above_the_shared_memory_are_refused_before_compiling(name: str, device: Device) -> None:
    reason = PIPELINES[name].unavailable(device.capabilities)
    if reason is not None:
        pytest.skip(reason)
    config = pipeline(name).config(131072, 1)
    array, other = device.empty(1 << 16, np.float32), device.empty(1 << 16, np.float32)
    with pytest.raises(
        ConfigError, match=r"at most \d+ bytes of shared memory .*use a smaller tile or fewer"
    ):
        pipeline(name).run(array, other, other, alpha=1.0, config=config)


@pytest.mark.parametrize("name", ["pingpong", "ring"])
def test_the_tma_is_refused_where_there_is_none(name: str) -> None:
    with Device.open("emu:a100") as device:
        array, other = device.empty(64, np.float32), device.empty(64, np.float32)
        with pytest.raises(ConfigError, match=r"needs the TMA .*A100.* has 8.0"):
            pipeline(name).run(array, other, other, alpha=1.0, config=pipeline(name).config(1024, 1))


def test_operands_that_do_not_match_are_refused() -> None:
    with Device.open("emu:h100") as device:
        ring, config = pipeline("ring"), RingConfig(1024)
        x, y, dst = (device.empty(512, np.float32) for _ in range(3))
        for operands, message in (
            ((dst, x, y[:511]), r"dst and y must have the same size \(got 2048 and 2044 bytes\)"),
            (
                (dst, device.empty(512, np.int32), y),
                r"dst and x must have one dtype \(got float32 and int32\)",
            ),
            (
                (dst[:508], x[1:509], y[:508]),
                r"x must be 16-byte aligned for cp.async.bulk \(got address ending",
            ),
            ((x[4:], x[:508], y[:508]), r"dst and x must not overlap"),
            ((dst, x, None), r"y must be a DeviceArray \(got NoneType\)"),
        ):
            with pytest.raises(OperandError, match=message):
                ring.run(*operands, alpha=1.0, config=config)  # type: ignore[arg-type]
        whole = [device.empty(512, np.int32) for _ in range(3)]
        with pytest.raises(OperandError, match=r"axpy computes in float32 \(got int32\)"):
            ring.run(*whole, alpha=1.0, config=config)
        with pytest.raises(ConfigError, match=r"config must be a PingpongConfig \(got RingConfig\)"):
            pipeline("pingpong").run(dst, x, y, alpha=1.0, config=config)


def test_refusals_come_before_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(CompileCache, "fetch", compiled)
    with Device.open("emu:h100") as device:
        x, y, dst = (device.empty(512, np.float32) for _ in range(3))
        with pytest.raises(OperandError):
            pipeline("ring").run(dst, x, y[:256], alpha=1.0, config=RingConfig(1024))
        with pytest.raises(AssertionError, match="compiled"):
            pipeline("ring").run(dst, x, y, alpha=1.0, config=RingConfig(1024))


def test_pipelines_have_names() -> None:
    with pytest.raises(KeyError, match=r"no pipeline 'rung'; there are pingpong, ring, .*ring_async"):
        pipeline("rung")
