"""Which device a string opens, and what happens when it is not there."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from smfree.cuda import Device, DeviceClosedError, DeviceSpecError, NoDeviceError, parse_spec
from smfree.cuda.choose import Kind, choose, choose_all, real_devices


@pytest.mark.parametrize(
    ("text", "kind", "shown"),
    [
        ("auto", Kind.AUTO, "auto"),
        ("cuda", Kind.CUDA, "cuda"),
        ("cuda:3", Kind.CUDA, "cuda:3"),
        ("cuda:0,2", Kind.CUDA, "cuda:0,2"),
        ("emu:h100", Kind.EMULATED, "emu:h100"),
        ("emu:a100x1", Kind.EMULATED, "emu:a100"),
        ("emu:h100x8", Kind.EMULATED, "emu:h100x8"),
        ("emu:h100x8:3", Kind.EMULATED, "emu:h100x8:3"),
        ("emu:h200x4:0,3", Kind.EMULATED, "emu:h200x4:0,3"),
    ],
)
def test_device_string_is_parsed(text: str, kind: Kind, shown: str) -> None:
    spec = parse_spec(text)
    assert (spec.kind, str(spec)) == (kind, shown)


@pytest.mark.parametrize(
    "text", ["gpu", "cuda:", "cuda:x", "cuda:1,", "cudax2", "emu:", "emu:rtx4090", "EMU:h100", "emu:h100xx2"]
)
def test_unknown_device_string_lists_the_known_ones(text: str) -> None:
    with pytest.raises(DeviceSpecError) as caught:
        parse_spec(text)
    assert repr(text) in str(caught.value)
    assert "auto, cuda, cuda:N, emu:a100, emu:b200, emu:h100, emu:h" in str(caught.value)
    assert "several GPUs: cuda:0,2 or emu:h100x8" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("emu:h100x0", "1 to 16 GPUs (got 'emu:h100x0'); use emu:h100x8"),
        ("emu:h100x17", "1 to 16 GPUs (got 'emu:h100x17')"),
        ("emu:h100x4:4", "'emu:h100x4:4': a node of 4 has the GPUs 0 to 3"),
        ("cuda:1,1", "each GPU is named once (got 'cuda:1,1')"),
    ],
)
def test_a_node_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(DeviceSpecError) as caught:
        parse_spec(text)
    assert message in str(caught.value)


def test_one_gpu_of_an_emulated_node_is_opened() -> None:
    with Device.open("emu:h100x3", ordinal=2) as device, Device.open("emu:h100x3:1") as other:
        assert (device.spec, device.ordinal) == ("emu:h100x3:2", 2)
        assert (other.spec, other.ordinal) == ("emu:h100x3:1", 1)
        assert device.uuid != other.uuid
        assert device.asarray([1, 2, 3]).numpy().tolist() == [1, 2, 3]


def test_an_ordinal_beyond_the_string_is_refused() -> None:
    with pytest.raises(DeviceSpecError, match=r"'emu:h100x3' names 3 GPUs, so ordinal is 0 to 2 \(got 3\)"):
        Device.open("emu:h100x3", ordinal=3)


def test_all_gpus_of_a_node_share_it_and_close_one_by_one() -> None:
    devices = Device.open_all("emu:a100x2", schedule="random", seed=7, strict="record")
    first, second = devices
    assert [device.spec for device in devices] == ["emu:a100x2:0", "emu:a100x2:1"]
    assert first.driver is second.driver and first.cache is second.cache
    node = first.driver.node
    assert (node.schedule, node.seed, node.strict, len(node.devices)) == ("random", 7, "record", 2)
    arrays = [device.asarray(np.arange(5)) for device in devices]
    assert abs(arrays[0].ptr - arrays[1].ptr) >= 1 << 39, "each device has its own window"
    first.close()
    assert arrays[1].numpy().tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(DeviceClosedError):
        arrays[0].numpy()
    second.close()


def test_environment_variable_decides_when_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMFREE_DEVICE", "cuda:1")
    assert str(parse_spec()) == "cuda:1"
    assert str(parse_spec("emu:a100")) == "emu:a100"
    monkeypatch.delenv("SMFREE_DEVICE")
    assert parse_spec().kind is Kind.AUTO


class _Driver:
    """cuInit and cuDeviceGetCount only."""

    def __init__(self, code: Any, count: int = 0) -> None:
        self.code, self.count = code, count

    def cuInit(self, flags: int) -> tuple[Any]:
        if isinstance(self.code, Exception):
            raise self.code
        return (self.code,)

    def cuDeviceGetCount(self) -> tuple[Any, int]:
        return cuda.CUresult.CUDA_SUCCESS, self.count


@pytest.mark.parametrize(
    ("driver", "reason", "count"),
    [
        (_Driver(RuntimeError("libcuda.so.1 not found")), "no NVIDIA driver", 0),
        (_Driver(cuda.CUresult.CUDA_ERROR_NO_DEVICE), "no NVIDIA GPU", 0),
        (
            _Driver(cuda.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH),
            "cuInit returned CUDA_ERROR_SYSTEM_DRIVER",
            0,
        ),
        (_Driver(cuda.CUresult.CUDA_ERROR_NOT_INITIALIZED), "forked after CUDA was initialised", 0),  # D12
        (_Driver(cuda.CUresult.CUDA_SUCCESS, 0), "no NVIDIA GPU", 0),
        (_Driver(cuda.CUresult.CUDA_SUCCESS, 2), "", 2),
    ],
)
def test_reason_why_there_is_no_gpu(driver: _Driver, reason: str, count: int) -> None:
    """cuda-python's cuInit raises where there is no driver library."""
    found, devices = real_devices(driver)
    assert reason in found and bool(reason) == bool(found) and devices == count


def _without_gpu(monkeypatch: pytest.MonkeyPatch, driver: _Driver) -> None:
    monkeypatch.setattr("smfree.cuda.choose.real_devices", lambda: real_devices(driver))


def test_cuda_0_without_a_gpu_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_gpu(monkeypatch, _Driver(RuntimeError("no libcuda")))
    with pytest.raises(NoDeviceError) as caught:
        Device.open("cuda:0")
    text = str(caught.value)
    assert text == (
        "cuda:0 was asked for, but this machine has no NVIDIA driver; use --device emu:h100 instead"
    )


def test_cuda_7_of_two_gpus_names_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_gpu(monkeypatch, _Driver(cuda.CUresult.CUDA_SUCCESS, 2))
    with pytest.raises(NoDeviceError, match=r"cuda:7 was asked for.*2 GPUs: cuda:0 to cuda:1"):
        choose("cuda:7")


def test_auto_without_a_gpu_emulates_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_gpu(monkeypatch, _Driver(cuda.CUresult.CUDA_ERROR_NO_DEVICE))
    with Device.open("auto") as device:
        assert (device.spec, device.is_emulated, device.clock_source) == ("emu:h100", True, "modelled")


def test_auto_with_a_broken_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_gpu(monkeypatch, _Driver(cuda.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH))
    with pytest.warns(RuntimeWarning, match="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH.*emulating h100"):
        assert choose("auto").is_emulated


def test_several_gpus_are_those_that_the_string_names(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_gpu(monkeypatch, _Driver(cuda.CUresult.CUDA_SUCCESS, 4))
    assert [choice.spec for choice in choose_all("cuda:0,2")] == ["cuda:0", "cuda:2"]
    assert [choice.ordinal for choice in choose_all("cuda")] == [0, 1, 2, 3]
    assert choose("cuda:3,1", ordinal=1).spec == "cuda:1"
    with pytest.raises(NoDeviceError, match=r"cuda:4 was asked for.*4 GPUs: cuda:0 to cuda:3"):
        choose_all("cuda:0,4")


def test_auto_takes_gpu_0_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_gpu(monkeypatch, _Driver(cuda.CUresult.CUDA_SUCCESS, 2))
    choice = choose("auto")
    assert (choice.spec, choice.is_emulated, choice.driver) == ("cuda:0", False, cuda)


@pytest.mark.parametrize("spec", ["auto", "cuda:1"])
def test_a_real_gpu_has_no_findings_to_record(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_gpu(monkeypatch, _Driver(cuda.CUresult.CUDA_SUCCESS, 2))
    with pytest.raises(DeviceSpecError, match=r"got 'record' for cuda:[01], a real one.*or open emu:h100"):
        choose(spec, strict="record")
    assert not choose(spec).is_emulated


def test_import_initialises_nothing() -> None:
    """Neither the driver nor NVRTC is loaded by importing the package (case D12)."""
    script = (
        "import smfree.cuda\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libnvrtc' not in maps and 'libcuda.so' not in maps, maps\n"
        "import sys\n"
        "assert 'triton' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
