"""The time of a launch: what its warps have spent, and what that is on the clocks of device and node."""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import Unsupported
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.residency import Extent, Residency

if TYPE_CHECKING:
    from smfree.emulator.exec.schedule import Schedule
    from smfree.emulator.node import DeviceState


class Times(Residency):
    """``time`` is the time of each warp, in cycles since the clock of the device was last reset, which a
    launch on an idle device does; ``origin`` is the launch's start among them. ``clock`` is None under
    schedules without one."""

    def __init__(
        self, device: DeviceState, grid: Extent, block: Extent, cluster: Extent | None, shared_bytes: int,
        registers: int | None, schedule: Schedule, start_s: float,
    ) -> None:  # fmt: skip
        super().__init__(device, grid, block, cluster, shared_bytes, registers)
        self.schedule, self.start_s = schedule, start_s
        spec = device.profile.device
        self.clock = device.clock if schedule.timed else None
        self.cycles_per_ns = spec.sm_clock_mhz / 1000.0
        self._hertz = spec.sm_clock_mhz * 1e6
        # Fewer warps than this, each issuing every dependent_cycles, never wait for a scheduler.
        issue = device.profile.issue
        warps = -(-self.geometry.slots // spec.num_sms) * self.geometry.warps_per_cta
        self.issue_contended = warps > issue.schedulers_per_sm * issue.dependent_cycles
        self.time: Any = np.zeros(self.geometry.num_warps)
        self.origin = self.end_time = self.change_time = 0.0
        self.clock_reads = 0

    @property
    def start_cycle(self) -> float:
        """The start, in cycles since the node was made; whole, so that kernels read no fraction."""
        return float(floor(self.start_s * self._hertz))

    def begin(self, origin: float) -> None:
        """The launch starts ``origin`` cycles after the device's clock did."""
        self.time += origin
        self.origin = self.end_time = self.change_time = origin

    @property
    def cycles(self) -> float:
        """Modelled time from the start to the last visible effect so far."""
        return self.end_time - self.origin

    @property
    def end_s(self) -> float:
        """When its latest effect was visible, in seconds of the node."""
        return self.start_s + self.cycles / self._hertz

    def settle(self, g: Group) -> Any:
        """Charge the instructions since the last time this was asked; times of the group's warps."""
        w = g.lanes.warp_slice
        t = self.time[w]
        if g.pending and self.clock is not None:
            if self.issue_contended:
                t = self.clock.issue(g.lanes.sm, t, g.pending)
            else:
                t = t + g.pending * self.clock.alu_latency
            self.time[w] = t
        g.pending = 0.0
        return t

    def now(self, g: Group) -> Any:
        """Cycles since the node was made, one per warp; refused under schedules without a clock."""
        if self.clock is None:
            raise Unsupported(
                f"the '{self.schedule.name}' schedule has no clock; read %clock64 and %globaltimer under "
                "'timed'",
                rule="clock.none",
            )
        self.clock_reads += 1
        return self.settle(g) + self.residents.epoch

    def node_ns(self, cycles: Any) -> Any:
        """Nanoseconds since the node was made of the launch's own times."""
        return (cycles + self.residents.epoch) / self.cycles_per_ns

    def cycles_of(self, ns: Any) -> Any:
        """The launch's own times of nanoseconds since the node was made."""
        return ns * self.cycles_per_ns - self.residents.epoch

    def nanoseconds(self, cycles: Any) -> Any:
        return cycles / self.cycles_per_ns

    def spend(self, g: Group, cycles: Any) -> None:
        """The group's warps are busy for so long, all the same or each its own time."""
        if self.clock is not None:
            self.time[g.lanes.warp_slice] = self.settle(g) + cycles

    def lane_times(self, g: Group) -> Any:
        """One time per lane; zeros under schedules without a clock."""
        if self.clock is None:
            return np.zeros(g.lanes.n)
        return self.settle(g)[g.lanes.warp_index]
