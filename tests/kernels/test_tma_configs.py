"""What the configurations of kernels/tma derive, against what the compiler made and the kernels say."""

from __future__ import annotations

import re

import pytest

from kernels.tma.dsmem import DsmemConfig
from kernels.tma.multicast import ClusterConfig
from kernels.tma.ring import RingConfig
from tests.kernels.cases import CASES, Case

MINE = [case for case in CASES if isinstance(case.config, (RingConfig, DsmemConfig))]
IDS = [case.name for case in MINE]


@pytest.mark.parametrize("case", MINE, ids=IDS)
def test_static_shared_memory_is_what_the_compiler_lays_out(case: Case) -> None:
    (facts,) = case.image("sm_90a").functions.values()
    assert facts.static_shared_bytes == case.config.static_shared_bytes


@pytest.mark.parametrize("case", MINE, ids=IDS)
def test_each_barrier_is_initialised_with_the_arrivals_of_the_plan(case: Case) -> None:
    text = case.config.source.read().decode()
    written = dict(re.findall(r"mbarrier_init\((\w+)_at\(\w\), (\w+)\);", text))
    cluster = case.config.cluster if isinstance(case.config, ClusterConfig) else 0
    arrivals = {name: cluster if count == "CLUSTER" else int(count) for name, count in written.items()}
    assert arrivals == {plan.name: plan.arrivals for plan in case.config.barriers}
