"""The launches that run on one device at a time, and the room they leave each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.occupancy import capacity

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch
    from smfree.emulator.exec.residency import Residency
    from smfree.emulator.specs import DeviceSpec


class Residents:
    """The launches on one device, oldest first. The clock of the device counts from ``epoch`` (cycles since
    the node was made) on; it begins anew when a launch enters an idle device.

    A launch starts when all CTAs of those before it have started, and there is room for one of its own (for
    all of them when it is cooperative). Its CTAs go wherever an SM has room.
    """

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self.launches: list[Launch] = []
        self.epoch = 0.0
        self.freed = 0.0
        """When room was given back last, in cycles since the node was made."""
        self.version = 0  # counts how often that was

    @property
    def shared(self) -> bool:
        return len(self.launches) > 1

    def enter(self, launch: Launch, start_cycle: float) -> float:
        """A launch begins ``start_cycle`` cycles after the node was made: its start on the device's clock."""
        if not self.launches:
            self.epoch = start_cycle
            if launch.clock is not None:
                launch.clock.reset(launch.node_ns(0.0))
        self.launches.append(launch)
        return start_cycle - self.epoch

    def leave(self, launch: Launch) -> None:
        """A launch is over. Twice is fine."""
        if launch in self.launches:
            self.launches.remove(launch)
            self.give_back(launch)

    def give_back(self, launch: Launch) -> None:
        """CTAs of a launch have left room for others."""
        self.version += 1
        self.freed = max(self.freed, launch.end_time + self.epoch)
        for other in self.launches:
            if other is not launch and not other.dispatched:
                other.wait_no_more()

    def look(self, launch: Launch) -> None:
        """A launch has run for a slice: the others may find memory changed."""
        for other in self.launches:
            if other is not launch:
                other.look(launch.node_ns(launch.change_time) * 1e-9)

    def admits(self, need: Any, most_per_sm: int, ctas: int) -> bool:
        """Whether a launch may start of which at least so many CTAs must be resident at once."""
        if not self.launches:
            return True
        return all(each.dispatched for each in self.launches) and len(self.room(need, most_per_sm)) >= ctas

    def crowd(self, ctas: int, cooperative: bool) -> str:
        """Why a launch that needs room for so many CTAs may not start."""
        names = ", ".join(launch.kernel.name for launch in self.launches)
        waiting = next((launch for launch in self.launches if not launch.dispatched), None)
        if waiting is not None:
            return f"CTAs of {waiting.kernel.name}, launched before it, have not all started"
        what = f"all {ctas} CTAs of a cooperative launch" if cooperative else f"{ctas} CTA{'s' * (ctas > 1)}"
        return f"beside {names} the device has no room for {what}"

    def room(self, need: Any, most_per_sm: int, mine: Residency | None = None) -> Any:
        """The SM of each further CTA with this footprint, the emptiest first; with those of ``mine`` already
        there, at most ``most_per_sm`` on each."""
        sms = self.spec.num_sms
        taken = np.zeros((sms, len(need)), np.int64)
        for launch in self.launches:
            taken += np.bincount(launch.sms, minlength=sms)[:, None] * np.array(launch.footprint)
        fit = ((np.array(capacity(self.spec)) - taken) // np.maximum(need, 1)).min(axis=1)
        own = 0 if mine is None else np.bincount(mine.sms, minlength=sms)
        fit = np.minimum(fit, most_per_sm - own)
        order = np.argsort(taken[:, 0], kind="stable")
        rounds = [order[fit[order] > k] for k in range(int(fit.max()))]
        return np.concatenate(rounds) if rounds else np.empty(0, np.int64)
