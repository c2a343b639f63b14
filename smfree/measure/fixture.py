"""The `measure` fixture: verify, time on the device, record.

Two ways to time, two methods. :meth:`Measure.launches` times whole launches with events behind a blocker
(throughput). :meth:`Measure.chain` takes what one CTA read from its own clock over a chain of dependent tiles
(latency).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from smfree.measure.clocks import ClockWatch, clock_ratio_mhz
from smfree.measure.collective import Exchange, Member, timed
from smfree.measure.devices import DevicePool
from smfree.measure.instruments import Instruments
from smfree.measure.log import RunLog
from smfree.measure.nodes import Node, NodeUnavailableError
from smfree.measure.points import ChainReading, Point
from smfree.measure.records import CacheState, Cost, Flag, Memory, Record
from smfree.measure.timer import DeviceTimer, Sample, launches_for

__all__ = ["ChainReading", "Measure", "Point"]

#: How often a sample on a reduced clock is repeated.
THROTTLE_RETRIES = 3


class Measure:
    """Measures points on one device within one test."""

    def __init__(
        self,
        spec: str,
        pool: DevicePool,
        instruments: Instruments,
        benchmark: Any,
        log: RunLog,
        *,
        rounds: int,
        versions: Mapping[str, str],
    ) -> None:
        self.spec = spec
        self.device = pool.get(spec)
        self.instruments = instruments
        self.log = log
        self.rounds = rounds
        self._pool = pool
        self._benchmark = benchmark
        self._versions = versions
        self.timer = DeviceTimer(instruments.queue, lambda: benchmark._mode)
        benchmark._timer = self.timer

    @property
    def deterministic(self) -> bool:
        """Whether a second round would repeat the first: true on the emulator's timed clock."""
        return bool(self.device.clock_source == "modelled")

    @property
    def stream(self) -> Any:
        """The stream that timed work must go to."""
        return self.instruments.stream

    @property
    def ranks(self) -> Any:
        """What this process is among several with a rank each (smfree.ranks.RankContext); None alone."""
        return self._pool.ranks

    @property
    def exchange(self) -> Exchange | None:
        """How the ranks of several processes tell each other bytes."""
        return None if self.ranks is None else self.ranks.rendezvous.all_gather

    @property
    def clock_watch(self) -> ClockWatch:
        """Knows the fastest SM clock that the device has shown."""
        return self._pool.watch(self.spec)

    def compiling(self) -> AbstractContextManager[None]:
        """Count the block as compile time."""
        return self.log.seconds.spend("compile")

    def node(self, ranks: int) -> list[Any]:
        """The first ``ranks`` GPUs of the device's machine; an emulated machine has as many as are asked for.
        Skips the point where there are fewer."""
        try:
            return self._pool.node(self.spec, ranks).devices
        except NodeUnavailableError as error:
            self.skip(str(error))

    def node_of(self, device: Any) -> Node:
        """The machine of a device that :meth:`node` gave."""
        return self._pool.node_of(device)

    def skip(self, reason: str) -> NoReturn:
        """This point is not possible here. The reason is shown and kept in the record."""
        pytest.skip(reason)

    # --- launches -------------------------------------------------------------------------------------------

    def launches(
        self,
        point: Point,
        launch: Callable[[int, Any], object],
        verify: Callable[[], None],
    ) -> Record:
        """Time ``launch(i, stream)``; ``i`` tells which of several rotated buffers to use.

        ``verify`` compares the outcome of launch 0 and raises when it is wrong. On a deterministic clock
        launch 0 is itself the sample; otherwise it only verifies and warms up.
        """
        self.timer.explicit()
        self.instruments.prepare()
        flush = self._flush if point.cache is CacheState.FLUSHED else None
        if self.deterministic and point.cache is CacheState.HOT:
            self.run(lambda: self.timer.batch(launch, 1, count=False))
        if not self.deterministic:
            self.run(lambda: self._warm_up(launch, flush))
        first = self.run(lambda: self.timer.batch(launch, 1, before_each=flush, count=False))
        counted = self.counters()
        self.verify(verify)
        clocks: list[float | None] = []
        batches: list[Sample] = []
        repeats = reduced = 0
        watch = self._pool.watch(self.spec)
        if self.deterministic:

            def target() -> None:
                batches.append(first)
                self.timer.add(first.seconds)

        else:
            floor = self.instruments.floor
            count = launches_for(max(first.seconds, floor.seconds))

            def sampled() -> tuple[Sample, float | None]:
                sample = self.timer.batch(launch, count, before_each=flush, count=False)
                return sample, self.instruments.sm_clock_mhz()

            def target() -> None:
                nonlocal repeats, reduced
                sample, mhz = sampled()
                for _ in range(THROTTLE_RETRIES):
                    if not watch.throttled(mhz) or not watch.rest():
                        break
                    repeats += 1
                    sample, mhz = sampled()
                reduced += watch.settle(mhz)
                floor.check(sample.seconds)
                clocks.append(mhz)
                batches.append(sample)
                self.timer.add(sample.seconds)

        self.pedantic(target)
        record = self.record(
            point, [sample.seconds for sample in batches], [], counted, point.traffic.payload_bytes
        )
        self.note_clock(record, clocks, "delta clock64 / delta globaltimer after each sample")
        self._timing(record, batches, repeats, clocks, launch_cancels=point.launch_cancels)
        record.flag_reduced(reduced, len(batches))
        return self.finish(record)

    def _timing(
        self,
        record: Record,
        batches: list[Sample],
        repeats: int,
        clocks: list[float | None],
        *,
        launch_cancels: bool,
    ) -> None:
        queue, floor = self.instruments.queue, self.instruments.floor
        record.timing = {
            "method": "events",
            "launches_per_sample": batches[0].launches if batches else 0,
            "empty_launch_s": floor.seconds,
            "samples_behind_blocker": sum(sample.held for sample in batches),
            "blocker": queue.blocker_reason or "cuStreamWaitValue32",
            "throttled_samples_repeated": repeats,
            "sm_clock_mhz_per_sample": clocks,
        }
        self.flag_gaps(record, all(sample.held for sample in batches))
        if not launch_cancels:
            floor.flag(record)

    def note_clock(self, record: Record, clocks: Sequence[float | None], note: str) -> None:
        """The SM clock of a record: the model's, or the median of what was seen, as ``note`` says."""
        known = sorted(mhz for mhz in clocks if mhz is not None)
        if self.deterministic:
            record.sm_clock_mhz = self.device.capabilities.sm_clock_mhz
            record.clock_note = "modelled clock, constant"
        elif known:
            record.sm_clock_mhz = known[len(known) // 2]
            record.clock_note = note

    def flag_gaps(self, record: Record, held: bool) -> None:
        if not held:
            reason = (
                self.instruments.queue.blocker_reason or "the host released the stream after its time-out"
            )
            record.add_flag(Flag.NO_BLOCKER, f"host launch gaps may lie inside the time: {reason}")

    def _flush(self, _: int, stream: Any) -> None:
        self.instruments.flush_l2(stream)

    def _warm_up(
        self, launch: Callable[[int, Any], object], flush: Callable[[int, Any], object] | None
    ) -> None:
        """Once without a blocker: what a first launch may wait for (lazy loading, local memory, another
        library's start) would never come while the stream is held."""
        if flush is not None:
            flush(0, self.stream)
        launch(0, self.stream)
        self.instruments.queue.synchronize()

    # --- chain ----------------------------------------------------------------------------------------------

    def chain(
        self,
        point: Point,
        run: Callable[[], ChainReading],
        verify: Callable[[], None],
    ) -> Record:
        """Time a chain; ``run`` prepares the cache state itself, waits, and returns what the kernel's clock
        said.

        pytest-benchmark sees the seconds of one tile.
        """
        self.timer.explicit()
        self.instruments.prepare()
        first = self.run(run)
        counted = self.counters() if first.counters is None else first.counters
        self.verify(verify)
        readings: list[ChainReading] = []
        repeats = reduced = 0
        watch = self._pool.watch(self.spec)

        def target() -> None:
            nonlocal repeats, reduced
            reading = first if self.deterministic else run()
            if not self.deterministic:
                for _ in range(THROTTLE_RETRIES):
                    if not watch.throttled(_mhz(reading)) or not watch.rest():
                        break
                    repeats += 1
                    reading = run()
                reduced += watch.settle(_mhz(reading))
            readings.append(reading)
            self.timer.add(reading.cycles_per_tile / (self._clock(reading) * 1e6))

        self.pedantic(target)
        mhz = [self._clock(reading) for reading in readings]
        record = self.record(
            point,
            [reading.cycles_per_tile / (clock * 1e6) for reading, clock in zip(readings, mhz, strict=True)],
            [reading.cycles_per_tile for reading in readings],
            counted,
            point.traffic.payload_bytes * first.tiles,
        )
        record.sm_clock_mhz = sorted(mhz)[len(mhz) // 2] if mhz else None
        record.clock_note = "delta clock64 / delta globaltimer of each sample"
        record.timing = {
            "method": first.method,
            "tiles": readings[0].tiles if readings else 0,
            "throttled_samples_repeated": repeats,
        }
        self.flag_gaps(record, all(reading.held for reading in readings))
        record.flag_reduced(reduced, len(readings))
        return self.finish(record)

    # --- collectives ----------------------------------------------------------------------------------------

    def collective(
        self,
        point: Point,
        members: Sequence[Member],
        launch: Callable[[int], object],
        verify: Callable[[], None],
        *,
        wait: Callable[[], None] | None = None,
        cold_counters: bool = False,
    ) -> Record:
        """Time ``launch(i)``, which queues a collective on the streams of all ``members``, on GPUs of
        :meth:`node`.

        See :func:`smfree.measure.collective.timed`.
        """
        return timed(self, point, members, launch, verify, wait=wait, cold_counters=cold_counters)

    def _clock(self, reading: ChainReading) -> float:
        return _mhz(reading) or float(self.device.capabilities.sm_clock_mhz)

    def replay(self, record: Record) -> Record:
        """Report a deterministic point that another process of this session ran and verified."""
        self.timer.explicit()
        samples = iter(record.samples_s)
        self.pedantic(lambda: self.timer.add(next(samples)))
        return self.finish(record)

    # --- shared ---------------------------------------------------------------------------------------------

    def run(self, work: Callable[[], Any]) -> Any:
        with self.log.seconds.spend("run"):
            return work()

    def counters(self) -> dict[str, int]:
        """Counters of the latest launch on an emulated device; empty on a real one."""
        last = self.device.emulator.last_launch if self.device.is_emulated else None
        return {} if last is None else last.counters.as_dict()

    def verify(self, verify: Callable[[], None]) -> None:
        with self.log.seconds.spend("verify"):
            verify()

    def pedantic(self, target: Callable[[], None]) -> None:
        with self.log.seconds.spend("run"):
            self._benchmark.pedantic(target, rounds=self.rounds, iterations=1)

    def record(
        self,
        point: Point,
        seconds: list[float],
        cycles: list[float],
        counters: Mapping[str, int],
        counted_bytes: int,
    ) -> Record:
        identity = self._pool.identity(self.spec)
        capabilities = self.device.capabilities
        return Record(
            name=self._benchmark.fullname,
            question=point.question,
            device=self.spec,
            identity=identity.as_dict(),
            folder=identity.folder,
            gpu=self.device.name,
            clock_source=self.device.clock_source,
            key=point.key,
            traffic=point.traffic,
            samples_s=seconds,
            samples_cycles=cycles,
            memory=point.memory,
            cache=point.cache,
            cache_bytes=capabilities.l2_bytes,
            working_set_bytes=point.working_set_bytes,
            peak_gbps=capabilities.peak_memory_gbps if point.memory is Memory.DRAM else 0.0,
            config=point.config,
            cost=_with_counters(point.cost, counters, counted_bytes),
            counters=counters,
            versions=self._versions,
            verified=True,
        )

    def finish(self, record: Record) -> Record:
        if self._benchmark.disabled:  # --benchmark-disable: run and verified, no number
            return record
        record.judge()
        if not self.deterministic:
            reasons = self._pool.watch(self.spec).ask(str(record.identity.get("uuid", "")))
            record.timing = {**record.timing, "nvidia_smi_clock_and_reasons": reasons}
        self._benchmark.extra_info.update(record.as_dict())
        self.log.records.append(record)
        return record


def _with_counters(cost: Cost, counters: Mapping[str, int], payload_bytes: int) -> Cost:
    """Add what only a run knows: executed PTX instructions and bytes through registers, per payload."""
    if not counters or not payload_bytes:
        return cost
    return replace(
        cost,
        ptx_per_kib=counters["warp_instructions"] / (payload_bytes / 1024),
        registers_per_byte=counters["bytes_through_registers"] / payload_bytes,
    )


def _mhz(reading: ChainReading) -> float | None:
    return clock_ratio_mhz(reading.cycles, reading.nanoseconds)
