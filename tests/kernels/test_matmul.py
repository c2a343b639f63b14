"""The matrix tiles: exact where float32 sums are exact, within a derived bound elsewhere; ragged tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.mbarrier.matmul import MatmulConfig, from_bfloat16, matmul, to_bfloat16
from smfree.cuda import Device
from tests.kernels import pairwise
from tests.kernels.mutant_kit import mutated, reported
from tests.kernels.pairwise import SCHEDULES

AXES = {
    "spec": ("emu:h100", "emu:b200"),
    "schedule": SCHEDULES,
    "stages": range(1, 9),
    "m": (1, 63, 64, 65, 130),
    "n": (1, 63, 64, 65, 130),
    "k": (8, 56, 64, 72, 136),
}
CANARY = np.float32(-123.25)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        rows = pairwise.rows(AXES, metafunc.config)
        metafunc.parametrize("row", rows, ids=["-".join(map(str, row.values())) for row in rows])


def small_integers(m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers below 2^3: products are below 2^6, and every sum of 2^18 of them is an integer below 2^24,
    which float32 holds exactly, in whatever order and with whatever rounding it is made."""
    rng = np.random.default_rng([m, n, k])
    return rng.integers(-7, 8, (m, k)).astype(np.float32), rng.integers(-7, 8, (n, k)).astype(np.float32)


def product(device: Device, config: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a @ b.T`` by the kernel, of values that bfloat16 holds; nothing around c is touched."""
    m, n = len(a), len(b)
    memory = device.asarray(np.full(m * n + 64, CANARY, np.float32))
    c = memory[32 : 32 + m * n].view(np.float32, (m, n))
    matmul(c, device.asarray(to_bfloat16(a)), device.asarray(to_bfloat16(b)), config=config)
    device.synchronize()
    around = memory.numpy()
    assert (around[:32] == CANARY).all() and (around[32 + m * n :] == CANARY).all()
    return c.numpy()


def test_small_integers_are_multiplied_exactly(row: dict[str, Any]) -> None:
    a, b = small_integers(row["m"], row["n"], row["k"])
    with pairwise.opened(row) as device:
        found = product(device, MatmulConfig(row["stages"]), a, b)
    np.testing.assert_array_equal(found, a.astype(np.float64) @ b.astype(np.float64).T)


@pytest.mark.parametrize("stages", [1, 3, 8])
def test_a_cta_computes_several_tiles_and_the_ring_wraps(stages: int) -> None:
    """One CTA per SM and more tiles than SMs: the ring runs on into the next tile, at any stage."""
    a, b = small_integers(64 * 12, 64 * 12 - 3, 64 * 3)
    with Device.open("emu:h100") as device:
        found = product(device, MatmulConfig(stages), a, b)
    np.testing.assert_array_equal(found, a.astype(np.float64) @ b.astype(np.float64).T)


@pytest.mark.parametrize("k", [64, 520])
def test_any_values_are_within_the_bound_of_k_truncated_additions(k: int) -> None:
    """A product of two bfloat16 has 16 bits: exact in float32. Tensor cores may cut sums off to 24 bits
    instead of rounding: each of the k additions is off by less than 2^-23 of the sum of |a b|."""
    rng = np.random.default_rng(k)
    a, b = (from_bfloat16(to_bfloat16(rng.standard_normal((70, k)).astype(np.float32))) for _ in range(2))
    with Device.open("emu:h100") as device:
        found = product(device, MatmulConfig(3), a, b)
    exact, scale = a.astype(np.float64) @ b.astype(np.float64).T, np.abs(a) @ np.abs(b).T.astype(np.float64)
    assert (np.abs(found - exact) <= k * 2.0**-23 * scale).all()
    assert (found != exact).any(), "the values are such that rounding shows"


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.5, 0, 2.0**-130], np.float32)
    rounded = [1, 1, 1 + 2**-6, 1 + 2**-7, -3.5, 0, 2.0**-130]
    assert from_bfloat16(to_bfloat16(values)).tolist() == rounded


def test_every_ldmatrix_is_free_of_bank_conflicts_and_bytes_come_by_the_tma() -> None:
    """Four 8 x 8 matrices of 16-bit elements are 4 x 128 bytes: 4 wavefronts, no more."""
    a, b = small_integers(128, 64, 192)
    with Device.open("emu:h100") as device:
        product(device, MatmulConfig(2), a, b)
        counters = device.emulator.last_launch.counters
    assert counters.shared_load_requests == 2 * 3 * 4 * 16, "tiles, blocks of k, warps, ldmatrix of a block"
    assert counters.shared_load_wavefronts == 4 * counters.shared_load_requests
    assert counters.bytes_async == 2 * 3 * 16384 and counters.tma_requests == 2 * 3 * 2
    assert counters.bytes_through_registers == 128 * 64 * 4, "C alone"


def test_rows_read_without_the_xor_are_permuted_by_it() -> None:
    """The XOR permutes the chunks of a row by its number modulo 8. Two rows that are permuted alike have the
    same product, all others another one."""
    config, (a, b) = MatmulConfig(2), small_integers(64, 64, 64)
    plain = mutated(config, ("((chunk ^ (row % 8)) * 16)", "chunk * 16"))
    with Device.open("emu:h100") as device:
        found = product(device, plain, a, b)
        counters = device.emulator.last_launch.counters
        assert counters.shared_load_wavefronts == 8 * 4 * counters.shared_load_requests
        right = product(device, config, a, b)
    alike = np.arange(64)[:, None] % 8 == np.arange(64) % 8
    np.testing.assert_array_equal(found[alike], right[alike])
    assert (found[~alike] != right[~alike]).mean() > 0.99


def test_a_warp_that_does_not_release_its_stage_hangs_the_producer() -> None:
    config, (a, b) = MatmulConfig(2), small_integers(64, 64, 192)
    broken = mutated(
        config, ("if (threadIdx.x % 32 == 0) mbarrier_arrive(", "if (threadIdx.x % 64 == 0) mbarrier_arrive(")
    )
    words = (
        "empty[0] of CTA 0, phase 0",
        "2 of 4 arrivals missing",
        "waiting: CTA 0 thread 128 at matmul.cu",
    )
    for schedule in ("timed", "async-latest"):
        with Device.open("emu:h100", schedule=schedule) as device, reported(*words):
            product(device, broken, a, b)
        with Device.open("emu:h100", schedule=schedule) as device:
            product(device, config, a, b)


def test_wrong_operands_and_configurations_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"num_stages must be 1 to 8 \(got 9\)"):
        MatmulConfig(9)
    with Device.open("emu:h100") as device:
        a, b, c = (
            device.empty(shape, dtype) for shape, dtype in (((4, 16), "u2"), ((5, 16), "u2"), ((4, 5), "f4"))
        )
        for arrays, rule in (
            (
                (c, a[:2], b),
                r"shapes \(m, k\), \(n, k\) and \(m, n\) \(got \(2, 16\), \(5, 16\) and \(4, 5\)\)",
            ),
            ((c, a.view(np.uint16), b), r"a must be a matrix of uint16 \(got uint16 of shape \(64,\)\)"),
            ((c, a, b.view(np.float16, (5, 16))), r"b must be a matrix of uint16 \(got float16"),
            ((c, a.view(np.uint16, (16, 4)), b), r"shapes"),
            (
                (device.empty((4, 5), "f4"), device.empty((4, 12), "u2"), device.empty((5, 12), "u2")),
                r"k must be a positive multiple of 8, .*\(got 12\); pad a and b with zeros to 16 columns",
            ),
            ((c, device.empty((4, 0), "u2"), device.empty((5, 0), "u2")), r"multiple of 8, .*\(got 0\)"),
        ):
            with pytest.raises(OperandError, match=rule):
                matmul(*arrays, config=MatmulConfig(1))
        nothing = matmul(device.empty((0, 5), "f4"), device.empty((0, 16), "u2"), b, config=MatmulConfig(1))
        assert nothing.kernel is None
    with Device.open("emu:a100") as device, pytest.raises(ConfigError, match="needs the TMA"):
        product(device, MatmulConfig(1), *small_integers(1, 1, 8))
