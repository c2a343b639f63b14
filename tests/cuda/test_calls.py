"""What a failed driver call says, and which of three situations it was."""

from __future__ import annotations

import os

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from smfree.cuda import (
    ContextFailedError,
    Device,
    DeviceClosedError,
    DeviceLostError,
    DriverError,
    KernelFaultError,
    ModuleLoadError,
    TensorMapError,
    UnavailableError,
)
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.sources import COPY, source

Code = cuda.CUresult


def test_refused_call_names_api_code_arguments_and_remedy(device: Device, fake: FakeDriver) -> None:
    fake.fail["cuMemAlloc"] = Code.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DriverError) as caught:
        device.empty(1 << 20, np.uint32)
    assert str(caught.value) == (
        "cuMemAlloc(bytes=4194304) returned CUDA_ERROR_OUT_OF_MEMORY (2); free device arrays or ask for less"
    )
    assert not isinstance(caught.value, KernelFaultError)
    del fake.fail["cuMemAlloc"]
    assert device.empty(16).nbytes == 16


def test_kernel_fault_kills_the_device_with_one_message_each(device: Device, fake: FakeDriver) -> None:
    """E15: after a sticky error nothing reaches the driver, and every later error names the first one."""
    fake.fail["cuCtxSynchronize"] = Code.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(
        KernelFaultError, match=r"cuCtxSynchronize\(\) returned CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"
    ):
        device.synchronize()
    fake.fail.clear()
    before = len(fake.log)
    for attempt in range(3):
        with pytest.raises(ContextFailedError) as caught:
            device.empty(16 + attempt)
        assert str(caught.value).count("\n") == 0
        assert "cuMemAlloc was not called" in str(caught.value)
        assert "First failure: cuCtxSynchronize" in str(caught.value)
    assert len(fake.log) == before


@pytest.mark.parametrize("code", [Code.CUDA_ERROR_ILLEGAL_ADDRESS, Code.CUDA_ERROR_ILLEGAL_INSTRUCTION])
def test_encoding_a_map_tells_an_earlier_fault_from_refused_arguments(
    device: Device, fake: FakeDriver, code: cuda.CUresult
) -> None:
    """E18: 700 and 715 at the encode call are an earlier kernel's; 1 is the map's."""
    array = device.empty((64, 64), np.float32)
    fake.fail["cuTensorMapEncodeTiled"] = Code.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(
        TensorMapError, match=r"the driver refused the map: cuTensorMapEncodeTiled\(rank=2, address="
    ):
        device.tensor_map(array, (32, 32))
    fake.fail["cuTensorMapEncodeTiled"] = code
    with pytest.raises(KernelFaultError) as caught:
        device.tensor_map(array, (32, 32))
    assert "a kernel launched earlier failed" in str(caught.value)
    assert "cuTensorMapEncodeTiled's own arguments were not refused" in str(caught.value)
    with pytest.raises(ContextFailedError, match="had already failed"):
        device.tensor_map(array, (32, 32))


@pytest.mark.parametrize("code", [Code.CUDA_ERROR_NO_DEVICE, Code.CUDA_ERROR_ECC_UNCORRECTABLE])
def test_lost_device_is_named(device: Device, fake: FakeDriver, code: cuda.CUresult) -> None:
    fake.fail["cuStreamSynchronize"] = code
    with pytest.raises(DeviceLostError, match=rf"{code.name}.*the device cuda:0 is lost"):
        device.default_stream.synchronize()
    with pytest.raises(ContextFailedError):
        device.stream()


def test_unknown_code_is_still_an_error(device: Device) -> None:
    with pytest.raises(DriverError, match=r"cuSomething\(size=3\) returned unknown code \(4711\)"):
        device.check("cuSomething", (4711,), size=3)


def test_checked_values_are_unpacked(device: Device) -> None:
    ok = Code.CUDA_SUCCESS
    assert device.check("cuNone", (ok,)) is None
    assert device.check("cuOne", (ok, 5)) == 5
    assert device.check("cuTwo", (ok, 5, 6)) == (5, 6)


def test_driver_too_old_for_the_compiler_names_both_versions(device: Device, fake: FakeDriver) -> None:
    """E06: unsupported PTX version, or a cubin the driver does not know."""
    fake.version = 12040
    fake.fail["cuModuleLoadData"] = Code.CUDA_ERROR_UNSUPPORTED_PTX_VERSION
    with pytest.raises(ModuleLoadError) as caught:
        device.compile(source(COPY))
    text = str(caught.value)
    assert "driver for CUDA 12.4" in text and "NVRTC" in text and "PTX" in text and "sm_90a" in text
    assert "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" in text and "update the driver" in text


def test_real_device_gets_the_cubin_and_loads_it_before_the_first_launch(
    device: Device, fake: FakeDriver
) -> None:
    """E06: a cubin for the device's own architecture does not depend on the driver's PTX version."""
    device.compile(source(COPY)).kernel("copy_words")
    ((data,),) = fake.calls("cuModuleLoadData")
    assert data[:4] == b"\x7fELF"
    assert len(fake.calls("cuFuncLoad")) == 1


def test_a_driver_older_than_cuFuncLoad_is_not_asked_for_it(device: Device, fake: FakeDriver) -> None:
    fake.version = 12020
    device.compile(source(COPY)).kernel("copy_words")
    assert fake.calls("cuModuleGetFunction") and not fake.calls("cuFuncLoad")


def test_a_function_that_the_driver_lacks_is_named_as_unavailable(
    device: Device, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: object) -> None:
        raise RuntimeError('Function "cuMulticastCreate_v2" not found')

    monkeypatch.setattr(fake, "cuMulticastCreate", missing, raising=False)
    with pytest.raises(UnavailableError, match=r"cuMulticastCreate: the driver of cuda:0 is older .* update"):
        device.calls("cuMulticastCreate", None)


def test_closed_device_refuses_calls_by_name(fake: FakeDriver) -> None:
    device = Device(fake, 0, spec="cuda:0", is_emulated=False)
    device.close()
    device.close()
    with pytest.raises(DeviceClosedError, match="cuMemAlloc after the device cuda:0 was closed"):
        device.empty(4)
    assert len(fake.calls("cuDevicePrimaryCtxRelease")) == 1


def test_d12_a_device_is_of_no_use_to_a_forked_process(device: Device, fake: FakeDriver) -> None:
    """It is told so, and frees nothing that belongs to its parent."""
    array = device.empty(64)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            array.free()
            device.synchronize()
        except DeviceClosedError as error:
            text = str(error)
        os.write(write, f"{len(fake.calls('cuMemFree'))} freed: {text}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(read, 1000).decode()
    os.close(read)
    os.close(write)
    assert text == (
        f"0 freed: cuCtxSynchronize: the device cuda:0 was opened in process {os.getpid()}, from which this "
        f"one ({child}) was forked; CUDA does not survive that: start processes with the method spawn "
        "(smfree.ranks.spawn) and open devices in them"
    )
    device.synchronize()
