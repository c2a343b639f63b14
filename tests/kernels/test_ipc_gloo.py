"""AllGather of two ranks under torchrun beside Gloo's: the bytes must be the same. Without torch left out."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.ranks.kit import under_torchrun

WAYS = ("sm.push", "tma.pull", "ce")
SCRIPT = f"""
import numpy as np
import torch
import torch.distributed as dist

from kernels.ipc.allgather import allgather
from kernels.ipc.group import Group
from smfree.ranks import join

dist.init_process_group("gloo")
with join("emu:h100x2") as context, Group.join(context.device, context.rendezvous) as group:
    shard = np.random.default_rng(context.rank).integers(0, 256, 1000, np.uint8)
    expected = [torch.empty(1000, dtype=torch.uint8) for _ in range(2)]
    dist.all_gather(expected, torch.from_numpy(shard))
    dst, src = group.symmetric(2000, "gathered"), context.device.asarray(shard)
    for way in {WAYS}:
        dst.array(context.rank).fill(0)
        allgather(group, dst, src, way=way)
        group.wait(timeout_s=30)
        same = bool((dst.array(context.rank).numpy() == torch.cat(expected).numpy()).all())
        print(f"{{context.rank}} {{way}} {{same}}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="Gloo comes with torch")
def test_every_way_gives_what_gloo_gives(tmp_path: Path) -> None:
    printed = under_torchrun(tmp_path / "gather.py", SCRIPT, 2, timeout_s=120)
    expected = [f"{rank} {way} True" for rank in range(2) for way in WAYS]
    assert printed == sorted(expected)
