"""Registers that warps of a CTA hand to each other (PTX ISA, "setmaxnreg").

At launch every warp owns as many registers per thread as the kernel was compiled for. ``.dec`` puts what a
warp no longer owns into the pool of its CTA; ``.inc`` takes from there and parks the warp until the pool has
enough. Each warp of a warpgroup (four warps from a multiple of four on) acts by itself, but all four have to
execute the same instructions. Two habits of Triton's warp-specialised kernels pass: the same action and count
at another place of the program, and an instruction that changes nothing. The registers of warps that have
exited do not return: the ISA does not say that they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import BarrierFault, EmulationError, Severity
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.table import Visible, visible
from smfree.emulator.ptx import ast
from smfree.emulator.ptx.setmaxnreg import UNIT, entry_registers
from smfree.emulator.specs import WARP_SIZE

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder
    from smfree.emulator.exec.launch import Launch

WARPS_PER_GROUP = 4
_ALL_LANES = np.uint32(0xFFFFFFFF)


@dataclass(slots=True)
class RegisterWait:
    """Parked in setmaxnreg.inc until each of its warps can own ``count`` registers per thread."""

    count: int


@visible("setmaxnreg")
def setmaxnreg(dec: Decoder, ins: ast.Instr) -> Visible:
    dec.only("inc", "dec", "sync", "aligned", "u32")
    count, unit, warps = dec.constant_value(ins.operands[0]), dec.launch.registers, dec.launch.warps
    if count is None:
        raise dec.wrong("setmaxnreg takes an immediate")
    mask, increase = dec.constant(_ALL_LANES), "inc" in ins.modifiers

    def act(g: Group) -> bool:
        return bool(warps.gather(g, mask, lambda whole: unit.change(whole, count, increase=increase)))

    return act


class RegisterUnit:
    """What each warp owns, per thread, and what the pool of each CTA slot holds, times 32 threads."""

    def __init__(self, launch: Launch, compiled: int | None) -> None:
        self.launch = launch
        self._bound = entry_registers(launch.kernel)
        entry = compiled if compiled is not None and self._bound is not None else self._bound
        self._at_entry = -(-(entry or 0) // UNIT) * UNIT
        geometry = launch.geometry
        self.owned = np.zeros(geometry.num_warps, np.int64)
        self.pool = np.zeros(geometry.slots, np.int64)
        self.parked: list[Group] = []
        self._freed = np.zeros(geometry.slots)  # when the pool last grew
        self._turns = np.zeros(geometry.num_warps, np.int64)  # setmaxnreg that changed what it owns
        self._last_pc = np.full(geometry.num_warps, -1)
        self._reported = False  # that there is no bound

    def reset(self, slots: Any) -> None:
        """New CTAs move into these slots."""
        warps = self._warps(slots).ravel()
        self.owned[warps] = self._at_entry
        self.pool[slots] = 0
        self._freed[slots] = 0.0
        self._turns[warps] = 0
        self._last_pc[warps] = -1

    def _warps(self, slots: Any) -> Any:
        """int64[slots, warps of a CTA]."""
        wpc = self.launch.geometry.warps_per_cta
        return slots[:, None] * wpc + np.arange(wpc)

    def change(self, g: Group, count: int, *, increase: bool) -> bool:
        """setmaxnreg.inc or .dec of whole warps; False when some had to be parked."""
        if self._bound is None:
            self._report_no_bound()
            return True
        self._check_direction(g, count, increase=increase)
        warps = g.lanes.warps
        changing = self.owned[warps] != count
        self._check_warpgroups(g, changing)
        self._turns[warps[changing]] += 1
        self._last_pc[warps[changing]] = g.pc
        launch = self.launch
        launch.settle(g)
        if increase:
            return self._grow(g, count)
        slots = warps // launch.geometry.warps_per_cta
        np.add.at(self.pool, slots, self.owned[warps] - count)
        np.maximum.at(self._freed, slots, launch.time[warps])
        self.owned[warps] = count
        launch.did_something()
        self._wake()
        return True

    def _grow(self, g: Group, count: int) -> bool:
        """Give the warps their registers, in their order; those that find too few wait."""
        served = self._serve(g, count)
        yes, no = self.launch.flow.part_mask(g, served[g.lanes.warp_index])
        if no is not None:
            no.wait = RegisterWait(count)
            self.parked.append(no)
            if yes is not None:
                self.launch.flow.resume([yes])
        return no is None

    def _serve(self, g: Group, count: int) -> Any:
        """bool[warps]: which of the group's warps now own ``count``."""
        warps = g.lanes.warps
        slots = warps // self.launch.geometry.warps_per_cta
        served = np.zeros(len(warps), np.bool_)
        for i, (warp, slot) in enumerate(zip(warps.tolist(), slots.tolist(), strict=True)):
            need = count - int(self.owned[warp])
            if need <= self.pool[slot]:
                self.pool[slot] -= need
                self.owned[warp] = count
                served[i] = True
        if self.launch.clock is not None:
            got = warps[served]
            self.launch.time[got] = np.maximum(self.launch.time[got], self._freed[slots[served]])
        return served

    def _wake(self) -> None:
        parked, self.parked = self.parked, []
        for g in parked:
            if self._grow(g, g.wait.count):
                self.launch.flow.resume([g])

    # ---------------------------------------------------------------- rules

    def _report_no_bound(self) -> None:
        if self._reported:
            return
        self._reported = True
        name = self.launch.kernel.name
        self.launch.report(
            EmulationError(
                f"kernel {name} has no register count at entry, so ptxas drops its setmaxnreg; give it "
                "__launch_bounds__(threads, 1) (.maxntid and .minnctapersm) or __maxnreg__(n) (.maxnreg)",
                rule="setmaxnreg.no_bound",
                severity=Severity.STRICT,
                index=0,
            )
        )

    def _check_direction(self, g: Group, count: int, *, increase: bool) -> None:
        owned = self.owned[g.lanes.warps]
        wrong = np.flatnonzero(owned > count if increase else owned < count)
        if not len(wrong):
            return
        i = int(wrong[0])
        word, other = ("inc", "dec") if increase else ("dec", "inc")
        raise EmulationError(
            f"setmaxnreg.{word} to {count} registers per thread, but the warp owns {int(owned[i])}: "
            f"undefined; use setmaxnreg.{other}, or another count",
            rule="setmaxnreg.direction",
            index=int(g.lanes.warp_starts[i]),
        )

    def _check_warpgroups(self, g: Group, changing: Any) -> None:
        """All four warps of a warpgroup take part, with the same instructions, in step."""
        wpc = self.launch.geometry.warps_per_cta
        for i, warp in enumerate(g.lanes.warps.tolist()):
            if not changing[i]:
                continue
            slot, number = divmod(warp, wpc)
            first = number // WARPS_PER_GROUP * WARPS_PER_GROUP
            group = slot * wpc + np.arange(first, min(first + WARPS_PER_GROUP, wpc))
            index = int(g.lanes.warp_starts[i])
            if len(group) < WARPS_PER_GROUP:
                raise BarrierFault(
                    f"setmaxnreg by warp {number} of a CTA with {wpc} warps: its warpgroup (four warps from "
                    f"a multiple of four on) is not whole; launch {-(-wpc // 4) * 128} threads",
                    rule="setmaxnreg.warpgroup",
                    index=index,
                )
            turns = self._turns[warp]
            instrs = self.launch.kernel.instrs
            ahead = group[self._turns[group] == turns + 1]
            differ = [w for w in ahead if instrs[self._last_pc[w]].text != instrs[g.pc].text]
            if differ:
                there = int(self._last_pc[differ[0]])
                raise BarrierFault(
                    f"warp {number} executes another setmaxnreg than warp {int(differ[0]) % wpc} of its "
                    f"warpgroup, which executed {instrs[there].text} at {self.launch.line_of(there)}; all "
                    "four warps must execute the same one",
                    rule="setmaxnreg.warpgroup",
                    index=index,
                )
            behind = group[self._turns[group] < turns]
            if len(behind):
                self.launch.report(
                    BarrierFault(
                        f"warp {number} executes a second setmaxnreg before warp {int(behind[0]) % wpc} of "
                        "its warpgroup has executed the first; the warpgroup must synchronise between the "
                        "two (bar.sync id, 128)",
                        rule="setmaxnreg.unsynchronised",
                        severity=Severity.STRICT,
                        index=index,
                    )
                )

    def retire(self, slots: Any) -> None:
        """All threads of these CTAs have exited: each warpgroup must have executed the same setmaxnreg."""
        if not self._turns.any():
            return
        for slot in slots.tolist():
            turns = self._turns[self._warps(np.array([slot]))[0]]
            for first in range(0, len(turns), WARPS_PER_GROUP):
                part = turns[first : first + WARPS_PER_GROUP]
                if (part != part[0]).any():
                    least, most = first + int(part.argmin()), first + int(part.argmax())
                    raise BarrierFault(
                        f"{self.launch.name_cta(slot)} exits, but warp {most} executed {int(part.max())} "
                        f"setmaxnreg and warp {least} of the same warpgroup {int(part.min())}: undefined; "
                        "all four warps of a warpgroup must execute it",
                        rule="setmaxnreg.warpgroup",
                        index=0,
                    )

    # ---------------------------------------------------------------- what a hang says

    def waiting(self) -> dict[int, list[Group]]:
        """The groups parked for registers, by CTA slot."""
        found: dict[int, list[Group]] = {}
        for g in self.parked:
            for slot in g.lanes.slots.tolist():
                found.setdefault(slot, []).append(g)
        return found

    def describe(self, slot: int) -> str:
        """Who of a CTA owns how many registers, and how many are missing."""
        wpc = self.launch.geometry.warps_per_cta
        owned = self.owned[slot * wpc : (slot + 1) * wpc]
        cuts = [0, *(np.flatnonzero(np.diff(owned)) + 1).tolist(), wpc]
        holders = [
            f"warps {a}-{b - 1} own {int(owned[a])}" if b - a > 1 else f"warp {a} owns {int(owned[a])}"
            for a, b in pairwise(cuts)
        ]
        missing = 0
        for g in self.parked:
            mine = g.lanes.warps[g.lanes.warps // wpc == slot]
            missing += int((g.wait.count - self.owned[mine]).sum())
        free = int(self.pool[slot])
        return (
            f"{(missing - free) * WARP_SIZE} of {missing * WARP_SIZE} registers missing, the pool holds "
            f"{free * WARP_SIZE}; per thread, {', '.join(holders)}"
        )
