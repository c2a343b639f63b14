"""What overlaps, in modelled time: whole pipelines against runs of the same kernels with one half left out.

``copy`` and ``compute`` are such runs; ``ends`` is the copy of one tile per CTA, which is the pipeline's fill
and drain: its first load and its last store overlap with nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from kernels.mbarrier.pipeline import Part
from kernels.mbarrier.registry import PIPELINES
from smfree.cuda import Device

SLACK = 1.1


@dataclass
class Bench:
    """Runs one shape of a pipeline from a cold L2: ``tiles`` per CTA. Times are SM cycles, modelled."""

    device: Device
    name: str
    tile_bytes: int
    threads: int
    tiles: int
    ctas: int
    _known: dict[tuple[int, int, Part, int], float] = field(default_factory=dict)

    def cycles(self, stages: int, work: int, part: Part = Part.BOTH, tiles: int | None = None) -> float:
        """One run."""
        key = (stages, 0 if part is Part.COPY else work, part, tiles or self.tiles)
        if key not in self._known:
            self._known[key] = self._run(*key)
        return self._known[key]

    def parts(self, stages: int, work: int) -> tuple[float, float, float]:
        """``copy``, ``compute``, ``ends``."""
        return (
            self.cycles(stages, work, Part.COPY),
            self.cycles(stages, work, Part.COMPUTE),
            self.cycles(stages, work, Part.COPY, tiles=1),
        )

    def _run(self, stages: int, work: int, part: Part, tiles: int) -> float:
        pipeline = PIPELINES[self.name]
        config = pipeline.config(
            self.tile_bytes, stages, threads=self.threads, work=work, part=part, max_ctas=self.ctas
        )
        elements = self.tile_bytes // 4 * self.ctas * tiles
        x = self.device.asarray(np.random.default_rng(1).random(elements, np.float32))
        y = self.device.asarray(np.random.default_rng(2).random(elements, np.float32))
        dst = self.device.empty(elements, np.float32)
        self.device.emulator.l2.flush()
        pipeline.run(dst, x, y, alpha=0.5, config=config)
        self.device.synchronize()
        return self.device.emulator.last_launch.cycles


@pytest.fixture(scope="module")
def h100() -> Iterator[Device]:
    with Device.open("emu:h100", schedule="timed") as opened:
        yield opened


@pytest.fixture(scope="module")
def one_cta(h100: Device) -> Bench:
    """Nobody else uses the memory. Work 4: copying and computing take about equally long."""
    return Bench(h100, "pingpong", tile_bytes=8192, threads=64, tiles=16, ctas=1)


def test_the_halves_are_near_equal_at_work_4(one_cta: Bench) -> None:
    copy, compute, _ = one_cta.parts(2, 4)
    assert compute == pytest.approx(copy, rel=0.1)


@pytest.mark.parametrize("work", [4, 8, 20])
def test_ping_pong_with_two_buffers_takes_the_longer_half(one_cta: Bench, work: int) -> None:
    copy, compute, ends = one_cta.parts(2, work)
    both = one_cta.cycles(2, work)
    assert both < SLACK * (max(copy, compute) + ends)
    assert both > 0.98 * max(copy, compute)


@pytest.mark.parametrize("work", [4, 8, 20])
def test_ping_pong_with_one_buffer_takes_the_sum(one_cta: Bench, work: int) -> None:
    copy, compute, _ = one_cta.parts(1, work)
    assert one_cta.cycles(1, work) == pytest.approx(copy + compute, rel=SLACK - 1)


@pytest.mark.parametrize("work", [1, 4])
def test_two_buffers_halve_one_buffers_time_at_best(one_cta: Bench, work: int) -> None:
    """A buffer is held by its load, its computation and its store, one after the other. Where that is the
    limit (work 1), neither half alone explains the time, and a third stage helps: ring.cu."""
    one, two = one_cta.cycles(1, work), one_cta.cycles(2, work)
    copy, compute, ends = one_cta.parts(2, work)
    assert one / 2 <= two < SLACK * (max(copy, compute, one / 2) + ends)


@pytest.mark.parametrize("work", [1, 4, 20])
def test_a_ring_of_four_hides_the_shorter_half(h100: Device, work: int) -> None:
    ring = Bench(h100, "ring", tile_bytes=8192, threads=96, tiles=16, ctas=1)
    copy, compute, _ = ring.parts(4, work)
    assert ring.cycles(4, work) < SLACK * max(copy, compute)


def test_two_buffers_overlap_when_every_sm_waits_for_dram(h100: Device) -> None:
    full = Bench(h100, "pingpong", tile_bytes=16384, threads=128, tiles=4, ctas=h100.capabilities.num_sms)
    copy, compute, ends = full.parts(2, 20)
    assert compute == pytest.approx(copy, rel=0.1)
    assert full.cycles(2, 20) < SLACK * (max(copy, compute) + ends)
    assert full.cycles(2, 20) < 0.75 * full.cycles(1, 20)
