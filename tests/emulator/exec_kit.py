"""Tiny kernels for the executor's tests: a body of PTX (or CUDA) in, bytes and counters out.

Registers a body may use: %p0-19, %h0-39 (16 bits), %r0-39 (32), %rd0-39 (64). On entry %rd0..2 hold the
parameters ``out``, ``a`` and ``b`` (device pointers), %r0 the parameter ``n``, %r1 the linear thread index
over the grid, %r2 = %tid.x, %r3 = %ctaid.x, %rd3 = out + 4 x %r1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smfree.emulator.errors import EmulationError
from smfree.emulator.exec.launch import LaunchResult, run
from smfree.emulator.exec.schedule import SCHEDULES
from smfree.emulator.node import Node
from smfree.emulator.ptx.ast import Kernel
from smfree.emulator.ptx.check import load
from tests.emulator.ptx_kit import nvrtc_ptx

KERNELS = Path(__file__).parents[2] / "kernels"
UNTIMED = tuple(s for s in SCHEDULES if s != "timed")
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)

_HEAD = """
.version {version}
.target {target}
.address_size 64
{globals}
.visible .entry k(.param .u64 out, .param .u64 a, .param .u64 b, .param .u32 n{params})
{{
.reg .pred %p<20>;
.reg .b16 %h<40>;
.reg .b32 %r<40>;
.reg .b64 %rd<40>;
{shared}
ld.param.u64 %rd0, [out];
ld.param.u64 %rd1, [a];
ld.param.u64 %rd2, [b];
ld.param.u32 %r0, [n];
mov.u32 %r2, %tid.x;
mov.u32 %r3, %ctaid.x;
mov.u32 %r39, %ntid.x;
mad.lo.s32 %r1, %r3, %r39, %r2;
mul.wide.u32 %rd39, %r1, 4;
add.s64 %rd3, %rd0, %rd39;
"""


def ptx(
    body: str,
    *,
    shared: str = "",
    globals: str = "",
    params: str = "",
    target: str = "sm_90a",
    version: str = "8.8",
) -> str:
    """A module with the kernel ``k`` around ``body``. ``.loc`` lines in the body speak of case.cu."""
    head = _HEAD.format(shared=shared, globals=globals, params=params, target=target, version=version)
    return f'{head}{body}\nret;\n}}\n.file 1 "case.cu"\n'


@cache
def kernel(
    body: str, *, shared: str = "", globals: str = "", params: str = "", target: str = "sm_90a"
) -> Kernel:
    """The parsed and checked kernel around ``body``; ``params`` are more parameters (", .param .u64 c")."""
    return load(ptx(body, shared=shared, globals=globals, params=params, target=target)).kernels["k"]


@cache
def cuda_kernel(source: str, *options: str, arch: str = "sm_90a") -> Kernel:
    """The only kernel of a CUDA snippet, compiled by NVRTC."""
    (only,) = load(nvrtc_ptx(source, arch, *options)).kernels.values()
    return only


def repository_kernel(name: str, *options: str, edit: tuple[str, str] | None = None) -> Kernel:
    """A kernel of kernels/, after replacing ``edit[0]`` by ``edit[1]`` in its source."""
    source = (KERNELS / name).read_text()
    if edit is not None:
        assert source.count(edit[0]) == 1, f"{edit[0]!r} is not in {name} exactly once"
        source = source.replace(*edit)
    return cuda_kernel(source, f"-I{KERNELS / 'include'}", *options)


@dataclass
class Machine:
    """One emulated device with a few helpers. ``strict``: "error", "record" or "off"."""

    schedule: str = "min-pc"
    seed: int = 0
    strict: str = "error"
    profile: Any = "h100"
    node: Node = field(init=False)

    def __post_init__(self) -> None:
        self.node = Node([self.profile], schedule=self.schedule, strict=self.strict)
        self.device = self.node.devices[0]
        self.memory = self.device.memory

    def put(self, array: np.ndarray) -> int:
        """A device copy of ``array``; its address."""
        where = self.memory.alloc(max(array.nbytes, 1))
        if array.nbytes:
            self.memory.write(where, array.tobytes())
        return where

    def empty(self, nbytes: int) -> int:
        """Device memory nobody has written."""
        return int(self.memory.alloc(max(nbytes, 1)))

    def get(self, address: int, count: int, dtype: Any = np.uint32) -> np.ndarray:
        """``count`` elements at a device address; never-written bytes are 0xff."""
        return np.frombuffer(bytes(self.memory.read(address, count * np.dtype(dtype).itemsize)), dtype)

    def launch(
        self,
        k: Kernel,
        params: bytes,
        grid: int | tuple[int, int, int] = 1,
        block: int | tuple[int, int, int] = 32,
        shared_bytes: int = 0,
        *,
        cluster: int | tuple[int, int, int] | None = None,
        registers: int | None = None,
        symbols: dict[str, int] | None = None,
    ) -> LaunchResult:
        grid3 = (grid, 1, 1) if isinstance(grid, int) else grid
        block3 = (block, 1, 1) if isinstance(block, int) else block
        cluster3 = (cluster, 1, 1) if isinstance(cluster, int) else cluster
        return run(
            self.device, k, params, grid3, block3, cluster3, shared_bytes, schedule=self.schedule,
            seed=self.seed, registers=registers, module_symbols=symbols,
        )  # fmt: skip


@dataclass
class Outcome:
    """What a body left behind: ``out`` as uint32, and the launch's result."""

    out: np.ndarray
    result: LaunchResult
    machine: Machine
    address: int

    @property
    def counters(self) -> Any:
        return self.result.counters

    def view(self, dtype: Any) -> np.ndarray:
        return self.out.view(dtype)


def execute(
    body: str,
    *,
    schedule: str = "min-pc",
    seed: int = 0,
    strict: str = "error",
    grid: int | tuple[int, int, int] = 1,
    block: int | tuple[int, int, int] = 32,
    cluster: int | tuple[int, int, int] | None = None,
    shared: str = "",
    a: np.ndarray | None = None,
    b: np.ndarray | None = None,
    n: int = 0,
    words: int | None = None,
    zero_out: bool = False,
    dynamic_shared_bytes: int = 0,
    machine: Machine | None = None,
) -> Outcome:
    """Run a body; ``out`` has ``words`` 32-bit words (default: one per thread)."""
    m = machine or Machine(schedule, seed, strict)
    threads = int(np.prod(grid)) * int(np.prod(block))
    words = threads if words is None else words
    out = m.put(np.zeros(words, np.uint32)) if zero_out else m.empty(words * 4)
    addresses = [m.put(x) if x is not None else 0 for x in (a, b)]
    params = struct.pack("<QQQI", out, *addresses, n)
    result = m.launch(kernel(body, shared=shared), params, grid, block, dynamic_shared_bytes, cluster=cluster)
    return Outcome(m.get(out, words), result, m, out)


@contextmanager
def report(
    *phrases: str, rule: str | None = None, kind: type[EmulationError] = EmulationError
) -> Iterator[Any]:
    """The block must raise an :class:`EmulationError` whose text has all ``phrases``."""
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    missing = [p for p in phrases if p not in text]
    assert not missing, f"the report lacks {missing}:\n{text}"
    if rule is not None:
        assert caught.value.rule == rule, text


def reads(phrases: Sequence[str], text: str) -> None:
    """Assert that a report has all phrases."""
    missing = [p for p in phrases if p not in text]
    assert not missing, f"the report lacks {missing}:\n{text}"
