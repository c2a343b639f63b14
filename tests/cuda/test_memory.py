"""Device arrays, host buffers, streams and who keeps what alive."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from typing import Any

import numpy as np
import pytest

from smfree.cuda import ArrayError, Device, DeviceArray, DeviceClosedError, LaunchError
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.sources import COPY, source


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 0), (3, 4), (2, 3, 5)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.int32, np.float64])
def test_round_trip_keeps_shape_type_and_bytes(device: Device, shape: tuple[int, ...], dtype: Any) -> None:
    data = np.random.default_rng(1).integers(0, 100, shape).astype(dtype)
    array = device.asarray(data)
    back = array.numpy()
    assert (back.shape, back.dtype, back.tobytes()) == (data.shape, data.dtype, data.tobytes())
    assert array.nbytes == data.nbytes


def test_slices_and_byte_views_share_memory(device: Device) -> None:
    data = np.arange(24, dtype=np.int32).reshape(6, 4)
    array = device.asarray(data)
    assert np.array_equal(array[2:5].numpy(), data[2:5])
    assert array[2:5].ptr == array.ptr + 2 * 16
    assert array[5:2].shape == (0, 4) and array[-2:].shape == (2, 4)
    odd = array.bytes_view(3, 8)
    assert odd.ptr == array.ptr + 3 and odd.numpy().tobytes() == data.tobytes()[3:11]
    assert np.array_equal(array.view(np.uint8).numpy(), data.view(np.uint8).ravel())
    array[0:1].fill(0xFF)
    assert array.numpy()[0].tolist() == [-1] * 4


@pytest.mark.parametrize("index", [3, slice(0, 4, 2), (slice(0, 1), slice(0, 1)), None])
def test_only_dense_slices_of_dimension_0(device: Device, index: Any) -> None:
    with pytest.raises(ArrayError, match=r"sliced along dimension 0 with step 1"):
        device.empty((6, 4))[index]


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (0, 25), (20, 8)])
def test_byte_view_stays_inside(device: Device, offset: int, nbytes: int) -> None:
    with pytest.raises(ArrayError, match=r"lie outside"):
        device.empty(24).bytes_view(offset, nbytes)


def test_copy_between_arrays_uses_the_driver(device: Device, fake: FakeDriver) -> None:
    src = device.asarray(np.arange(10, dtype=np.uint16))
    dst = device.empty(10, np.uint16).copy_from_device(src)
    assert np.array_equal(dst.numpy(), np.arange(10))
    assert len(fake.calls("cuMemcpyDtoDAsync")) == 1
    with pytest.raises(ArrayError, match=r"sizes must agree"):
        dst.copy_from_device(src[1:])


@pytest.mark.parametrize("data", [np.zeros(3, np.int32), np.zeros(4, np.int64)])
def test_host_data_of_another_shape_or_type_is_refused(device: Device, data: np.ndarray) -> None:
    with pytest.raises(ArrayError, match=r"does not fit"):
        device.empty(4, np.int32).copy_from(data)


def test_objects_are_no_device_data(device: Device) -> None:
    with pytest.raises(ArrayError, match=r"numbers or plain structures"):
        device.asarray(np.array([object()]))


def test_memory_is_freed_with_the_last_view(device: Device, fake: FakeDriver) -> None:
    array = device.empty((4, 4), np.float32)
    view = array[1:2]
    address = array.ptr
    del array
    gc.collect()
    assert address in fake.memory
    del view
    gc.collect()
    assert address not in fake.memory


def test_use_after_free_is_an_error_by_name(device: Device, fake: FakeDriver) -> None:
    array = device.empty(16)
    view = array[4:8]
    array.free()
    array.free()
    assert len(fake.calls("cuMemFree")) == 1
    with pytest.raises(DeviceClosedError, match=r"was freed"):
        view.numpy()


def test_arrays_outlive_their_device_without_harm(fake: FakeDriver) -> None:
    device = Device(fake, 0, spec="cuda:0", is_emulated=False)
    array, stream, event = device.empty(16), device.stream(), device.event()
    device.close()
    assert len(fake.calls("cuMemFree")) == 1 and not fake.memory
    with pytest.raises(DeviceClosedError, match=r"its device cuda:0 closed"):
        array.numpy()
    with pytest.raises(DeviceClosedError):
        stream.synchronize()
    calls = len(fake.log)
    del array, stream, event
    gc.collect()
    assert len(fake.log) == calls


def test_pinned_memory_outlives_its_device_while_a_view_lives(fake: FakeDriver) -> None:
    device = Device(fake, 0, spec="cuda:0", is_emulated=False)
    view = device.pinned((4, 2), np.float32).array[1:]
    device.close()
    gc.collect()
    view[:] = 7
    assert len(fake.memory) == 1 and not fake.calls("cuDevicePrimaryCtxRelease")
    del view
    gc.collect()
    assert len(fake.calls("cuDevicePrimaryCtxRelease")) == 1


def test_a_copy_from_the_host_has_arrived_when_it_returns(device: Device, fake: FakeDriver) -> None:
    """Also for a non-blocking stream, which does not wait for the default stream's transfers."""
    array = device.asarray(np.arange(64, dtype=np.uint32))
    names = [name for name, _ in fake.log if name != "cuCtxSetCurrent"]
    assert names[-2:] == ["cuMemcpyHtoD", "cuStreamSynchronize"]
    stream = device.stream()
    array.copy_from(np.arange(64, dtype=np.uint32), stream=stream)
    assert fake.log[-1][0] == "cuMemcpyHtoDAsync"


def test_mapped_memory_has_a_device_address(device: Device, fake: FakeDriver) -> None:
    mapped = device.pinned(8, np.uint32, mapped=True)
    assert mapped.device_ptr == mapped.ptr + 2**40 and mapped.mapped
    assert fake.calls("cuMemHostAlloc")[0] == (32, 1 | 2)
    plain = device.pinned(8, np.uint32)
    with pytest.raises(ArrayError, match=r"not mapped.*mapped=True"):
        _ = plain.device_ptr


def test_pageable_buffer_is_plain_numpy(device: Device) -> None:
    buffer = device.pageable((3, 3), np.int16)
    buffer.array[:] = 5
    assert not buffer.pinned and device.asarray(buffer).numpy().sum() == 45


def test_queued_work_keeps_its_buffers_alive(device: Device) -> None:
    """E12: references dropped after the launch; the memory stays until the host knows that the work is
    done."""
    kernel = device.compile(source(COPY)).kernel()
    stream = device.stream()
    src, dst = device.asarray(np.arange(64, dtype=np.uint32)), device.empty(64, np.uint32)
    kernel.launch(1, 64, [dst, src, np.uint32(64)], stream=stream)
    alive = [weakref.ref(src.allocation), weakref.ref(dst.allocation)]
    del src, dst
    gc.collect()
    assert all(ref() is not None and not ref().freed for ref in alive)  # type: ignore[union-attr]
    stream.synchronize()
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_queued_work_keeps_a_wrapped_owner_alive(device: Device) -> None:
    """E12: another library's memory must not be recycled while a kernel uses it."""

    class Foreign:
        def __init__(self, array: DeviceArray) -> None:
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    memory = device.empty(64, np.uint32)
    foreign = Foreign(memory)
    kernel = device.compile(source(COPY)).kernel()
    kernel.launch(1, 64, [device.wrap(foreign), memory, np.uint32(64)])
    alive = weakref.ref(foreign)
    del foreign
    gc.collect()
    assert alive() is not None
    device.synchronize()
    gc.collect()
    assert alive() is None


def test_event_lets_go_of_what_came_before_it_only(device: Device) -> None:
    stream = device.stream()
    first, second = device.empty(16), device.empty(16)
    first.fill(1, stream=stream)
    event = stream.record()
    second.fill(2, stream=stream)
    alive = [weakref.ref(first.allocation), weakref.ref(second.allocation)]
    del first, second
    event.synchronize()
    gc.collect()
    assert alive[0]() is None and alive[1]() is not None


def test_asynchronous_upload_keeps_the_host_array(device: Device) -> None:
    stream = device.stream()
    data = np.arange(16, dtype=np.uint8)
    device.empty(16).copy_from(data, stream=stream)
    alive = weakref.ref(data)
    del data
    gc.collect()
    assert alive() is not None
    stream.synchronize()
    gc.collect()
    assert alive() is None


def test_wrap_accepts_the_array_interface_and_nothing_on_the_host(device: Device) -> None:
    array = device.asarray(np.arange(12, dtype=np.float32).reshape(3, 4))
    assert device.wrap(array) is array

    class Foreign:
        def __init__(self, **changes: Any) -> None:
            self.__cuda_array_interface__ = array.__cuda_array_interface__ | changes

    assert np.array_equal(device.wrap(Foreign()).numpy(), array.numpy())
    assert device.wrap(Foreign(strides=(16, 4))).ptr == array.ptr
    with pytest.raises(ArrayError, match=r"strided \(shape \(3, 4\), strides \(4, 12\)"):
        device.wrap(Foreign(strides=(4, 12)))
    with pytest.raises(ArrayError, match=r"read-only"):
        device.wrap(Foreign(data=(array.ptr, True)))
    with pytest.raises(ArrayError, match=r"not in device memory.*device.asarray"):
        device.wrap(np.zeros(3))


class _Dlpack:
    """An array that speaks DLPack only."""

    def __init__(self, kind: int, array: DeviceArray | None = None) -> None:
        self.kind, self.array = kind, array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0


def test_wrap_takes_dlpack_through_torch(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    array = device.asarray(np.arange(4, dtype=np.int64))
    with pytest.raises(ArrayError, match=r"device type 1, not CUDA \(2\)"):
        device.wrap(_Dlpack(1))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ArrayError, match="needs torch; install the extra torch"):
        device.wrap(_Dlpack(2, array))
    torch = types.ModuleType("torch")
    torch.from_dlpack = lambda thing: thing.__dlpack__()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert device.wrap(_Dlpack(2, array)).numpy().tolist() == [0, 1, 2, 3]


def test_tensor_that_hides_its_memory_says_why(device: Device) -> None:
    class WithGradient:
        @property
        def __cuda_array_interface__(self) -> dict:
            raise RuntimeError("requires grad")

    with pytest.raises(ArrayError, match=r"WithGradient does not show its device memory \(requires grad\)"):
        device.wrap(WithGradient())


def test_garbage_found_during_a_call_is_freed_after_it(device: Device, fake: FakeDriver) -> None:
    """A collection inside the (emulated) driver must not call into it again."""

    class Cycle:
        def __init__(self) -> None:
            self.me, self.array = self, device.empty(16)

    answers = fake.answers()
    during: list[str] = []

    def synchronize() -> tuple[()]:
        gc.collect()
        during.extend(name for name, _ in fake.log)
        return ()

    fake.answers = lambda: answers | {"cuCtxSynchronize": synchronize}  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    try:
        Cycle()
        device.synchronize()
    finally:
        gc.enable()
    assert during[-1] == "cuCtxSynchronize" and "cuMemFree" not in during
    assert fake.log[-1][0] == "cuMemFree" and not fake.memory


def test_wrap_on_a_gpu_goes_by_the_context_not_by_the_ordinal(device: Device, fake: FakeDriver) -> None:
    """Some versions of the binding give ordinal 0 for every device; memory without a context is taken."""
    array = device.empty(4)

    class Foreign:
        __cuda_array_interface__ = array.__cuda_array_interface__

    for context in (0, int(device.calls.context)):
        fake.contexts[array.ptr] = context
        assert device.wrap(Foreign()).ptr == array.ptr
    fake.contexts[array.ptr] = 0x77
    with pytest.raises(ArrayError, match="another context than that of cuda:0"):
        device.wrap(Foreign())


def test_wrap_refuses_another_device(device: Device, fake: FakeDriver) -> None:
    other = Device(FakeDriver(), 0, spec="cuda:1", is_emulated=False)
    with pytest.raises(ArrayError, match=r"belongs to another device"):
        device.wrap(other.empty(4))


def test_events_measure_microseconds(device: Device) -> None:
    stream = device.stream()
    start, end = stream.record(), stream.record()
    assert end.elapsed_us(start) == 250.0
    with pytest.raises(LaunchError, match=r"two events with timing"):
        end.elapsed_us(stream.record(device.event(timing=False)))


def test_streams_wait_for_the_default_stream_unless_asked_not_to(device: Device, fake: FakeDriver) -> None:
    device.stream()
    device.stream(non_blocking=True)
    assert [args[0] for args in fake.calls("cuStreamCreate")] == [0, 1]
