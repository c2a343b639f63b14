"""Phases, parity and what the operations cost: the answers are the ISA's, the costs have an order."""

from __future__ import annotations

import pytest

from kernels.common import ConfigError
from kernels.mbarrier.phases import (
    TX_ONLY,
    Lesson,
    Operation,
    PhasesConfig,
    measure,
    sass_instructions,
    unavailable,
)
from smfree.cuda import Device, compile_cuda
from tests.kernels.cases import EVERY_ARCH

ANSWERS = {
    Lesson.FRESH_PARITY_1: True,
    Lesson.FRESH_PARITY_0: False,
    Lesson.ONE_ARRIVED: False,
    Lesson.PHASE_0_COMPLETE: True,
    Lesson.PHASE_1_PENDING: False,
    Lesson.PHASE_1_COMPLETE: True,
    Lesson.PARITY_WRAPPED: False,
    Lesson.BYTES_MISSING: False,
    Lesson.BYTES_LANDED: True,
}
HANDOVERS = (Operation.MBARRIER_HANDOVER, Operation.BAR_HANDOVER, Operation.FLAG_HANDOVER)


def test_test_wait_answers_as_the_isa_says(device: Device) -> None:
    assert unavailable(device.capabilities) is None
    costs = measure(device)
    has_tx = device.capabilities.has_tma
    assert costs.answers == {one: ANSWERS[one] for one in Lesson if has_tx or one not in TX_ONLY}


@pytest.mark.timing
def test_every_operation_that_the_device_has_takes_time(device: Device) -> None:
    costs = measure(device)
    assert costs.clock_source == ("modelled" if device.is_emulated else "measured")
    timed = [one for one in Operation if device.capabilities.has_tma or one not in TX_ONLY]
    assert list(costs.cycles) == timed
    assert all(took > 0 for one, took in costs.cycles.items() if one is not Operation.NOTHING)


@pytest.mark.timing
def test_a_handover_takes_longer_than_an_arrival_and_a_wait_that_hits(device: Device) -> None:
    """The waiter was there first: it has to be woken, or to look once more."""
    cycles = measure(device).cycles
    alone = cycles[Operation.ARRIVE] + cycles[Operation.TEST_WAIT_HIT]
    assert cycles[Operation.MBARRIER_HANDOVER] > alone


@pytest.mark.parametrize("spec", ["emu:a100", "emu:h100"])
def test_cost_of_one_operation_does_not_depend_on_how_many_are_timed(spec: str) -> None:
    with Device.open(spec) as device:
        few, many = measure(device, PhasesConfig(8)).cycles, measure(device, PhasesConfig(32)).cycles
    for one in few:
        assert many[one] == pytest.approx(few[one], rel=0.15, abs=0.5), one


@pytest.mark.parametrize("arch", EVERY_ARCH)
def test_sass_has_one_timed_section_per_operation(arch: str) -> None:
    counts = sass_instructions(compile_cuda(PhasesConfig().source, arch))
    assert list(counts) == [one for one in Operation if arch != "sm_80" or one not in TX_ONLY]
    assert counts[Operation.NOTHING] == 0
    assert 1 <= counts[Operation.ARRIVE] < 4
    assert 1 <= counts[Operation.BAR_SYNC] < 3
    assert all(counts[one] > counts[Operation.ARRIVE] for one in HANDOVERS)


@pytest.mark.parametrize("turns", [0, 3, 66, -2])
def test_turns_that_do_not_return_to_parity_0_are_refused(turns: int) -> None:
    with pytest.raises(ConfigError, match=rf"turns must be even, 2 to 64 \(got {turns}\)"):
        PhasesConfig(turns)


@pytest.mark.parametrize("schedule", ["min-pc", "random"])
def test_without_a_clock_nothing_is_launched(schedule: str) -> None:
    with Device.open("emu:h100", schedule=schedule) as device:
        said = rf"only the schedule 'timed' has \(got '{schedule}'\); open the device with schedule='timed'"
        with pytest.raises(ConfigError, match=said):
            measure(device)
        assert device.emulator.last_launch is None
