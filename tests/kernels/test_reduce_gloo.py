"""AllReduce and ReduceScatter of three ranks under torchrun beside Gloo's. Without torch left out.

Sums of three whole numbers up to 63 have 8 bits, which every element has: bits must be the same. Of random
terms Gloo adds in an order of its own, with a rounding each time: what it finds, and what we do, is off the
true sum by an error bound at most, so the two differ by two of them at most.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.kernels.reduce_bodies import CASES
from tests.ranks.kit import under_torchrun

SCRIPT = """
import numpy as np
import torch
import torch.distributed as dist

from kernels.ipc.group import Group
from kernels.reduce.allreduce import allreduce
from kernels.reduce.elements import Element
from kernels.reduce.message import chunk_of
from kernels.reduce.order import error_bound
from kernels.reduce.reduce_scatter import reduce_scatter
from kernels.reduce.workspace import Workspace
from smfree.ranks import join
from tests.kernels.reduce_bodies import CASES

COUNT = 500


def terms(element, kind):
    "The bits of all ranks."
    random = [np.random.default_rng(rank) for rank in range(3)]
    values = [r.integers(-63, 64, COUNT) if kind == "whole" else r.standard_normal(COUNT) for r in random]
    return [element.narrow(each.astype(np.float32)) for each in values]


def by_gloo(bits, element):
    tensor = torch.from_numpy(element.widen(bits).copy()).to(getattr(torch, element.value))
    dist.all_reduce(tensor)
    return tensor.float().numpy()


def by_us(space, collective, way, element, bits):
    (member,) = space.group.members
    src, part = member.device.asarray(bits), slice(COUNT)
    if collective == "allreduce":
        sums = space.group.symmetric(src.nbytes, "sums")
        allreduce(space, sums, src, dtype=element, way=way)
        found = sums.array(member.rank)
    else:
        begin, end = chunk_of(src.nbytes, element, 3, member.rank)
        part = slice(begin // element.bytes, end // element.bytes)
        found = member.device.empty(end - begin, np.uint8)
        reduce_scatter(space, found, src, dtype=element, way=way)
    space.group.wait(timeout_s=60)
    return element.widen(found.numpy().view(element.bits)), part


dist.init_process_group("gloo")
with join("emu:h100x3") as context, Group.join(context.device, context.rendezvous) as group:
    with Workspace(group, channels=16) as space:
        for collective, way, element in CASES:
            for kind in ("whole", "random"):
                data = terms(element, kind)
                far = error_bound(way, data, element) + error_bound("ring.sm", data, element)
                gloo = by_gloo(data[context.rank], element)
                found, part = by_us(space, collective, way, element, data[context.rank])
                off = np.abs(found - gloo[part])
                right = bool((off == 0 if kind == "whole" else off <= far[part]).all())
                said = f"{context.rank} {collective} {way} {element.value} {kind} {right}\\n"
                print(said, end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="Gloo comes with torch")
def test_every_way_gives_what_gloo_gives(tmp_path: Path) -> None:
    printed = under_torchrun(tmp_path / "reduce.py", SCRIPT, 3, timeout_s=300)
    expected = [
        f"{rank} {collective} {way} {element.value} {kind} True"
        for rank in range(3)
        for collective, way, element in CASES
        for kind in ("whole", "random")
    ]
    assert printed == sorted(expected)
