"""Sectors and wavefronts against a warp-by-warp count in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smfree.emulator.coalescing import sectors_per_warp, wavefronts_per_warp


def count_sectors(warp: list[int], nbytes: int) -> int:
    return len({byte // 32 for start in warp for byte in range(start, start + nbytes)})


def count_wavefronts(warp: list[tuple[int, int]], nbytes: int) -> int:
    """``warp``: (lane, address). Wavefronts of each part = the most distinct words on one bank."""
    lanes_per_part = 32 // max(1, nbytes // 4)
    total = 0
    for part in {lane // lanes_per_part for lane, _ in warp}:
        banks: dict[int, set[int]] = {}
        for lane, start in warp:
            if lane // lanes_per_part == part:
                for word in range(start // 4, (start + nbytes - 1) // 4 + 1):
                    banks.setdefault(word % 32, set()).add(word)
        total += max(len(words) for words in banks.values())
    return total


@st.composite
def accesses(draw: st.DrawFn, largest: int) -> tuple[list[list[tuple[int, int]]], int]:
    nbytes = draw(st.sampled_from([s for s in (1, 2, 4, 8, 16, 32) if s <= largest]))
    full = draw(st.booleans())
    same = draw(st.booleans())
    base = draw(st.sampled_from([0, 1 << 41]))
    shapes = [
        draw(st.sampled_from(["random", "line", "stride", "broadcast"]))
        for _ in range(draw(st.integers(1, 4)))
    ]
    stride = draw(st.integers(0, 40))
    warps = []
    for shape in shapes if not same else shapes[:1] * len(shapes):
        lanes = list(range(32)) if full else sorted(draw(st.sets(st.integers(0, 31), min_size=1)))
        start = draw(st.integers(0, 64))
        step = {"random": 0, "line": 1, "stride": stride, "broadcast": 0}[shape]
        offsets = [start + step * lane for lane in lanes]
        if shape == "random":
            offsets = [draw(st.integers(0, 200)) for _ in lanes]
        warps.append([(lane, base + nbytes * offset) for lane, offset in zip(lanes, offsets, strict=True)])
    return warps, nbytes


def flatten(warps: list[list[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    flat = np.array([pair for warp in warps for pair in warp], np.int64)
    starts = np.cumsum([0] + [len(warp) for warp in warps[:-1]])
    return flat[:, 1].copy(), flat[:, 0].copy(), starts


@settings(max_examples=300)
@given(accesses(32))
def test_sectors_equal_the_count_byte_by_byte(case: tuple[list[list[tuple[int, int]]], int]) -> None:
    warps, nbytes = case
    addr, _, starts = flatten(warps)
    wanted = [count_sectors([a for _, a in warp], nbytes) for warp in warps]
    assert sectors_per_warp(addr, nbytes, starts).tolist() == wanted


@settings(max_examples=300)
@given(accesses(16))
def test_wavefronts_equal_the_count_bank_by_bank(case: tuple[list[list[tuple[int, int]]], int]) -> None:
    warps, nbytes = case
    addr, lanes, starts = flatten(warps)
    wanted = [count_wavefronts(warp, nbytes) for warp in warps]
    assert wavefronts_per_warp(addr, nbytes, starts, lanes).tolist() == wanted


@pytest.mark.parametrize(("nbytes", "sectors", "wavefronts"), [(4, 4, 1), (8, 8, 2), (16, 16, 4)])
def test_a_contiguous_warp(nbytes: int, sectors: int, wavefronts: int) -> None:
    addr = np.arange(64, dtype=np.int64) * nbytes
    starts = np.array([0, 32])
    assert sectors_per_warp(addr, nbytes, starts).tolist() == [sectors] * 2
    assert wavefronts_per_warp(addr, nbytes, starts).tolist() == [wavefronts] * 2


@pytest.mark.parametrize(
    ("stride_bytes", "wavefronts"), [(0, 1), (4, 1), (8, 2), (16, 4), (128, 32), (132, 1)]
)
def test_conflicts_of_strided_words(stride_bytes: int, wavefronts: int) -> None:
    addr = np.arange(32, dtype=np.int64) * stride_bytes
    assert wavefronts_per_warp(addr, 4, np.array([0])).tolist() == [wavefronts]


def test_no_warps() -> None:
    nothing = np.empty(0, np.int64)
    assert len(sectors_per_warp(nothing, 4, nothing)) == len(wavefronts_per_warp(nothing, 4, nothing)) == 0
