"""Which device a string opens, and what happens when it is not there."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from smfree.cuda import Device, DeviceSpecError, NoDeviceError, parse_spec
from smfree.cuda.choose import Kind, choose, real_devices


@pytest.mark.parametrize(
    ("text", "kind", "shown"),
    [
        ("auto", Kind.AUTO, "auto"),
        ("cuda", Kind.CUDA, "cuda:0"),
        ("cuda:3", Kind.CUDA, "cuda:3"),
        ("emu:h100", Kind.EMULATED, "emu:h100"),
        ("emu:a100x1", Kind.EMULATED, "emu:a100"),
    ],
)
def test_device_string_is_parsed(text: str, kind: Kind, shown: str) -> None:
    spec = parse_spec(text)
    assert (spec.kind, str(spec)) == (kind, shown)


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "emu:", "emu:rtx4090", "EMU:h100", "emu:h100xx2"])
def test_unknown_device_string_lists_the_known_ones(text: str) -> None:
    with pytest.raises(DeviceSpecError) as caught:
        parse_spec(text)
    assert repr(text) in str(caught.value)
    assert "auto, cuda:N, emu:a100, emu:b200, emu:h100, emu:h200" in str(caught.value)


def test_several_emulated_devices_are_refused_by_name() -> None:
    with pytest.raises(DeviceSpecError, match=r"several emulated devices \('emu:h100x2'\).*use emu:h100"):
        parse_spec("emu:h100x2")


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
