"""The machines that tests run on: emulated GPUs, or real ones that ``--device`` or SMFREE_DEVICE names.

A test that takes ``node`` gets the name of one. ``emu:h100`` has as many GPUs as the test asks for. A name
that counts or picks its GPUs has just those: ``cuda`` (all real ones), ``cuda:0``, ``emu:h100:0``. Ranks then
share them where they are fewer, so that one GPU tests all but bandwidth (``--device emu:h100:0`` tries that
without a GPU); tests that need GPUs of their own are skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import pytest

from smfree.cuda import Device
from smfree.cuda.choose import Kind, parse_spec, real_devices
from smfree.measure.options import device_specs
from smfree.ranks import spawn
from smfree.ranks.gpus import Gpus


def parametrize(metafunc: pytest.Metafunc, fixture: str, emulated: Sequence[str], real: str) -> None:
    """Run a test that takes ``fixture`` on each device that was asked for, else on ``emulated`` and, where
    there is a GPU, on ``real``. The markers ``on_device`` and, for those of several GPUs, ``node`` select
    such tests."""
    if fixture in metafunc.fixturenames:
        specs = device_specs(metafunc.config)
        if specs == ["auto"]:
            specs = [*emulated, *([real] if real_devices()[1] else [])]
        marks = [pytest.mark.on_device, *([pytest.mark.node] if fixture == "node" else [])]
        params = [pytest.param(spec, marks=marks) for spec in specs]
        metafunc.parametrize(fixture, params, ids=specs, indirect=True)


def is_emulated(node: str) -> bool:
    """Whether the GPUs are."""
    return parse_spec(node).kind is Kind.EMULATED


def machine(node: str, count: int) -> Gpus:
    """The GPUs of ``node`` for so many ranks."""
    spec = parse_spec(node)
    grows = spec.kind is Kind.EMULATED and spec.count == 1 and spec.ordinals is None
    return Gpus.of(f"{node}x{count}" if grows else node)


def open_gpus(node: str, count: int, **options: Any) -> list[Device]:
    """``count`` different GPUs; skips where the machine has fewer. ``options``: as of Device.open_all."""
    gpus = machine(node, count)
    if gpus.count < count:
        pytest.skip(f"needs {count} GPUs, {node} has {gpus.count}")
    return _open(gpus, **options)[:count]


def open_ranks(node: str, num_ranks: int, **options: Any) -> list[Device]:
    """A device for each rank; ranks that share a GPU share its device. ``options`` (schedule, seed) are an
    emulated node's: on real GPUs nobody chooses them."""
    return list(islice(cycle(_open(machine(node, num_ranks), **options)), num_ranks))


def _open(gpus: Gpus, **options: Any) -> list[Device]:
    return Device.open_all(str(gpus.spec), **(options if gpus.emulated else {}))


def spawn_ranks(node: str, function: Any, num_ranks: int, *args: Any, **options: Any) -> list[Any]:
    """:func:`smfree.ranks.spawn` on the GPUs of ``node``."""
    gpus = machine(node, num_ranks)
    shared = num_ranks > gpus.count
    return spawn(function, num_ranks, *args, device=str(gpus.spec), several_per_gpu=shared, **options)
