"""What the driver's tests share: a node whose executor only takes notes, small PTX texts, checked calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cuda.bindings import driver as cuda

from smfree.emulator.counters import Counters
from smfree.emulator.driver import Driver
from smfree.emulator.node import Node
from smfree.emulator.streams import Progress

CUresult = cuda.CUresult
SUCCESS = CUresult.CUDA_SUCCESS
ONE = (1, 1, 1)


@dataclass
class Outcome:
    """A kernel of the fake executor: it runs for ``cycles`` and does nothing meanwhile."""

    start_s: float
    end_s: float
    cycles: float
    counters: Counters = field(default_factory=Counters)
    findings: Sequence[Any] = ()
    ctas_per_sm: int = 1
    polls = polls_host = False

    @property
    def next_s(self) -> float:
        return self.end_s

    def advance(self, limit_s: float) -> Progress:
        return Progress.DONE

    def look(self, now_s: float) -> None:
        pass

    def last_resort(self) -> bool:
        return False

    def stuck(self) -> list[str]:
        return []

    def drop(self) -> None:
        pass


@dataclass
class Call:
    """One call of the fake executor."""

    kernel: str
    params: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] | None
    shared_bytes: int
    start_s: float
    symbols: dict[str, int]
    registers: int | None


class FakeExecutor:
    """Takes notes; ``effect(device, params)`` stands for the kernel's work and may raise a fault."""

    def __init__(self, cycles: float = 17550.0, effect: Callable[[Any, bytes], None] | None = None) -> None:
        self.cycles = cycles
        self.effect = effect
        self.calls: list[Call] = []

    def __call__(
        self,
        device: Any,
        kernel: Any,
        params: bytes,
        grid: Any,
        block: Any,
        cluster: Any,
        dynamic_shared_bytes: int,
        *,
        schedule: str,
        seed: int,
        start_s: float,
        module_symbols: Any,
        registers: int | None,
        context: Any,
    ) -> Outcome:
        symbols = dict(module_symbols)
        self.calls.append(
            Call(
                kernel.name,
                params,
                grid,
                block,
                cluster,
                dynamic_shared_bytes,
                start_s,
                symbols,
                registers,
            )
        )
        if self.effect is not None:
            self.effect(device, params)
        end_s = start_s + self.cycles / (device.clock.clock_mhz * 1e6)
        return Outcome(
            start_s, end_s, self.cycles, Counters(warp_instructions=7, instructions_by_class={"alu": 7})
        )


def ptx(
    name: str = "work", params: str = "", directives: str = "", variables: str = "", target: str = "sm_80"
) -> bytes:
    """A module with one kernel that does nothing."""
    return (
        f".version 8.0\n.target {target}\n.address_size 64\n{variables}\n"
        f".visible .entry {name}({params})\n{directives}\n{{\n  ret;\n}}\n"
    ).encode()


def ok(result: tuple[Any, ...], driver: Driver | None = None) -> Any:
    """The value(s) of a call that must succeed."""
    assert result[0] is SUCCESS, (result[0], driver.report() if driver is not None else "")
    values = result[1:]
    return None if not values else values[0] if len(values) == 1 else values


def refused(driver: Driver, result: tuple[Any, ...], code: str, *words: str) -> str:
    """The report of a call that must fail with ``code``; it must hold ``words``."""
    assert result[0] is getattr(CUresult, f"CUDA_ERROR_{code}"), (result[0], driver.report())
    assert all(value is None for value in result[1:])
    report = driver.report()
    for word in words:
        assert word in report, report
    return report


def open_driver(*profiles: str, executor: Any = None, **settings: Any) -> Driver:
    """A driver on a new node, device 0's primary context current."""
    node = Node(list(profiles) or ["h100"], executor=executor or FakeExecutor(), **settings)
    driver = Driver(node)
    ok(driver.cuInit(0))
    context = ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))
    ok(driver.cuCtxSetCurrent(context))
    return driver


def attach(node: Node, ordinal: int = 0, label: str = "") -> Driver:
    """Another process on a node, with its primary context on device ``ordinal`` current."""
    driver = Driver(node, label)
    ok(driver.cuInit(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(ordinal))))
    return driver


def open_node(driver: Driver) -> list[Any]:
    """Primary contexts on every device of the driver's node; device 0's is current."""
    contexts = [ok(driver.cuDevicePrimaryCtxRetain(device.ordinal)) for device in driver.node.devices]
    ok(driver.cuCtxSetCurrent(contexts[0]))
    return contexts


def array_of(driver: Driver, values: np.ndarray) -> Any:
    """New device memory of the current context that holds ``values``."""
    pointer = ok(driver.cuMemAlloc(values.nbytes))
    ok(driver.cuMemcpyHtoD(pointer, values, values.nbytes))
    return pointer


def values_at(driver: Driver, pointer: Any, count: int) -> np.ndarray:
    """``count`` 32-bit words, once the current context has done what is queued before."""
    found = np.zeros(count, np.uint32)
    ok(driver.cuMemcpyDtoH(found, pointer, found.nbytes), driver)
    return found


def load(driver: Driver, image: bytes, name: bytes = b"work") -> Any:
    """A function of a newly loaded module."""
    return ok(driver.cuModuleGetFunction(ok(driver.cuModuleLoadData(image), driver), name), driver)


def launch(driver: Driver, function: Any, stream: Any = 0, params: Any = None, **shape: Any) -> Any:
    """cuLaunchKernel's result, 1 x 32 unless ``shape`` (grid, block, shared_bytes) says otherwise."""
    grid, block = shape.get("grid", ONE), shape.get("block", (32, 1, 1))
    return driver.cuLaunchKernel(function, *grid, *block, shape.get("shared_bytes", 0), stream, params, 0)


def config(
    grid: tuple[int, int, int] = ONE,
    block: tuple[int, int, int] = (32, 1, 1),
    shared_bytes: int = 0,
    attributes: Sequence[Any] = (),
    stream: Any = 0,
) -> Any:
    """A CUlaunchConfig."""
    made = cuda.CUlaunchConfig()
    made.gridDimX, made.gridDimY, made.gridDimZ = grid
    made.blockDimX, made.blockDimY, made.blockDimZ = block
    made.sharedMemBytes, made.hStream = shared_bytes, cuda.CUstream(int(stream))
    made.attrs, made.numAttrs = list(attributes), len(attributes)
    return made


def cluster_attribute(x: int, y: int = 1, z: int = 1) -> Any:
    """CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""
    made = cuda.CUlaunchAttribute()
    made.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    made.value.clusterDim.x, made.value.clusterDim.y, made.value.clusterDim.z = x, y, z
    return made


def cooperative_attribute() -> Any:
    """CU_LAUNCH_ATTRIBUTE_COOPERATIVE."""
    made = cuda.CUlaunchAttribute()
    made.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    made.value.cooperative = 1
    return made


def word_at(address: int) -> ctypes.c_uint32:
    """The 32-bit word at a host address."""
    return ctypes.c_uint32.from_address(address)
