"""What the tests of the TMA kernels share: sweeps over schedules and devices, the mutation of one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from typing import Any

import numpy as np
import pytest

from smfree.cuda import CudaSource, Device, DeviceArray, KernelFaultError
from tests.kernels import pairwise
from tests.kernels.pairwise import SCHEDULES

SPECS = ("emu:h100", "emu:b200")
"""Emulated devices that have a TMA."""
SIZES = ("0", "1", "tile-1", "tile", "tile+1", "ragged", "wraps")
CTAS = 2
"""At most so many CTAs share the tiles of a sweep, so that their rings wrap."""


def sweep(metafunc: pytest.Metafunc, **axes: Sequence[Any]) -> None:
    """Run the test's ``row`` over emulated devices, schedules and ``axes``: pairs, or all combinations."""
    if "row" in metafunc.fixturenames:
        rows = pairwise.rows({"spec": SPECS, "schedule": SCHEDULES, **axes}, metafunc.config)
        metafunc.parametrize("row", rows, ids=["-".join(map(_shown, row.values())) for row in rows])


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "".join(str(part) for part in value if part)
    return value.name if isinstance(value, Enum) else str(value)


def extent(size: str, tile: int, num_stages: int = 1, unit: int = 1) -> int:
    """A length around a tile, in steps of ``unit``; ``wraps`` uses each stage of each CTA three times."""
    around = {"0": 0, "1": unit, "tile-1": tile - unit, "tile": tile, "tile+1": tile + unit}
    return around.get(size, (2 if size == "ragged" else 3 * num_stages * CTAS) * tile + unit)


def random_array(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Random finite values (floats) or random bits (integers)."""
    rng, kind = np.random.default_rng(seed), np.dtype(dtype)
    if kind.kind == "f":
        return rng.standard_normal(shape).astype(kind)
    info = np.iinfo(kind)
    return rng.integers(info.min, info.max, shape, kind, endpoint=True)


def filled(device: Device, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
    """Device memory that holds 0xA5 in every byte: what a kernel does not write stays so."""
    return device.empty(shape, dtype).fill(0xA5)


def same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    """Bitwise equality, with numpy's report of the first differences."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    word = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(word), np.ascontiguousarray(expected).view(word))


def mutated(config: Any, line: str, replacement: str) -> Any:
    """The same configuration, whose kernel has ``line`` (which stands there once) replaced."""
    source = config.source
    text = source.read().decode()
    assert text.count(line) == 1, f"{line!r} stands once in {source.name}"
    text = text.replace(line, replacement)

    class Mutated(type(config)):  # type: ignore[misc]
        @property
        def source(self) -> CudaSource:
            return CudaSource(source.path, dict(source.defines), text=text)

    return Mutated(**{item.name: getattr(config, item.name) for item in fields(config)})


@contextmanager
def faults(*words: str) -> Iterator[None]:
    """The kernel faults, and the report holds all ``words``."""
    with pytest.raises(KernelFaultError) as caught:
        yield
    for word in words:
        assert word in str(caught.value), str(caught.value)
