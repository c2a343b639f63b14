"""Devices of a served node, opened as any other: what SMFREE_NODE changes and what it does not."""

from __future__ import annotations

import gc
import os
import signal

import numpy as np
import pytest

from smfree.cuda import CudaSource, Device
from smfree.cuda.choose import NODE_VARIABLE
from smfree.cuda.errors import (
    ContextFailedError,
    DeviceLostError,
    DeviceSpecError,
    KernelFaultError,
    NoDeviceError,
    TraceError,
)
from smfree.emulator.server import start
from tests.emulator.server_kit import Servers

SOURCE = CudaSource(
    "scale.cu",
    text='extern "C" __global__ void scale(float* out, const float* in, float by, int count) {\n'
    "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
    "  if (i < count) out[i] = in[i] * by;\n}\n",
)


@pytest.fixture
def served(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE_VARIABLE, servers.node("h100", "h100").address)


def test_kernel_runs_on_a_device_of_a_served_node(served: None) -> None:
    with Device.open("emu:h100x2", ordinal=1) as device:
        assert (device.spec, device.clock_source, device.has_clock) == ("emu:h100x2:1", "modelled", True)
        data = np.random.default_rng(7).random(300, np.float32)
        source, out = device.asarray(data), device.empty(300, np.float32)
        kernel = device.compile(SOURCE).kernel("scale")
        kernel.launch(3, 128, [out, source, np.float32(2), np.int32(300)])
        np.testing.assert_array_equal(out.numpy(), data * np.float32(2))
        assert device.emulator.last_launch.kernel == "scale" and not device.findings
        assert device.emulator.last_launch.counters.global_store_bytes == 1200
        pinned = device.pinned(300, np.float32, mapped=True)
        assert pinned.device_ptr == pinned.ptr
        kernel.launch(3, 128, [pinned.device_ptr, source, np.float32(3), np.int32(300)])
        queued = device.host_seconds()
        device.synchronize()
        assert 0 < queued < device.host_seconds() < 1e-3
        np.testing.assert_array_equal(pinned.array, data * np.float32(3))


def test_devices_of_one_process_belong_together(served: None) -> None:
    first, second = Device.open_all("emu:h100x2")
    with first, second:
        assert first.driver is second.driver
        data = first.asarray(np.arange(8))
        copy = second.empty(8, np.int64)
        second.copy(copy, data)
        np.testing.assert_array_equal(copy.numpy(), np.arange(8))


def test_process_is_named_by_its_rank_and_a_fault_ends_with_its_devices(
    served: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    gc.collect()  # a driver that an earlier device still holds would keep its name
    device = Device.open("emu:h100x2")
    small = device.empty(4, np.float32).fill(0)
    device.compile(SOURCE).kernel("scale").launch(1, 32, [small, small, np.float32(1), np.int32(5)])
    with pytest.raises(KernelFaultError, match=r"scale\.cu:3"):
        device.synchronize()
    array = device.emulator
    with pytest.raises(ContextFailedError):
        device.empty(4)
    assert f"rank 3 (pid {os.getpid()})" == device.driver._link.info["label"] and array.ordinal == 0
    device.close()
    del device, small, array
    gc.collect()
    with Device.open("emu:h100x2") as again:
        assert again.asarray(np.arange(3)).numpy().tolist() == [0, 1, 2]


def test_trace_of_a_served_node_is_refused_by_name(served: None) -> None:
    with (
        Device.open("emu:h100x2") as device,
        pytest.raises(TraceError, match="served by another process"),
        device.trace(),
    ):
        pass


@pytest.mark.parametrize("spec", ["emu:h100", "emu:h100x4", "emu:a100x2"])
def test_other_gpus_than_the_served_ones_are_refused(served: None, spec: str) -> None:
    with pytest.raises(DeviceSpecError, match=f"{spec} was asked for, but the node .* GPUs h100, h100"):
        Device.open(spec)


@pytest.mark.parametrize(("name", "value"), [("schedule", "random"), ("seed", 5), ("strict", "record")])
def test_setting_that_the_node_does_not_have_is_refused(served: None, name: str, value: object) -> None:
    with pytest.raises(DeviceSpecError, match=f"{name}={value!r} was asked for"):
        Device.open("emu:h100x2", **{name: value})  # type: ignore[arg-type]


def test_settings_left_out_are_those_of_the_node(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE_VARIABLE, servers.node(schedule="random", seed=3).address)
    with Device.open("emu:h100") as device:
        assert not device.has_clock
    with Device.open("emu:h100", schedule="random", seed=3):
        pass


def test_address_nobody_serves_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE_VARIABLE, "smfree-node-of-nobody")
    with pytest.raises(NoDeviceError, match=r"SMFREE_NODE is set, but no process serves .*nobody.*unset it"):
        Device.open("emu:h100")


def test_lost_node_is_a_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with start("h100") as node:
        monkeypatch.setenv(NODE_VARIABLE, node.address)
        device = Device.open("emu:h100")
        array = device.asarray(np.arange(4))
        os.kill(node.pid, signal.SIGKILL)
        with pytest.raises(DeviceLostError, match=rf"emu:h100 is lost\n.*pid {node.pid}\) is gone"):
            array.numpy()
        with pytest.raises(ContextFailedError, match="already failed"):
            array.numpy()
        device.close()
