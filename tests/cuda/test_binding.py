"""The real binding takes every call in the form in which smfree.cuda makes it."""

from __future__ import annotations

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from smfree.cuda import Device
from smfree.cuda.choose import real_devices
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.sources import DYNAMIC, source


def _exercise(device: Device) -> None:
    """Every kind of call once."""
    kernel = device.compile(source(DYNAMIC)).kernel()
    stream = device.stream()
    data = np.arange(64, dtype=np.uint32)
    src, dst = device.asarray(data), device.empty(64, np.uint32).copy_from(data, stream=stream)
    start = stream.record()
    kernel.launch(4, 64, [dst, src, np.uint32(64)], stream=stream, shared_bytes=60_000, cluster=2)
    kernel.launch(4, 64, [dst, src, np.uint32(64)], cooperative=True, programmatic=True)
    kernel.max_active_clusters(2, 64, 1024)
    kernel.occupancy(64)
    end = stream.record()
    device.default_stream.wait(end)
    stream.write_value(dst.ptr, 1)
    stream.wait_value(dst.ptr, 1)
    end.elapsed_us(start)
    start.synchronize()
    start.query()
    stream.query()
    dst.copy_from_device(src, stream=stream).fill(0).numpy(stream=stream)
    dst.numpy()
    device.wrap(type("Foreign", (), {"__cuda_array_interface__": src.__cuda_array_interface__}))
    device.pinned(16, mapped=True)
    device.tensor_map(src.view(np.uint32, (8, 8)), (8, 8))
    device.driver_version  # noqa: B018
    device.synchronize()
    stream.destroy()


def test_argument_forms_pass_the_bindings_conversion() -> None:
    """Without a driver library the binding converts the arguments, then finds no library: any TypeError is
    ours."""
    reason, _ = real_devices()
    if "no NVIDIA driver" not in reason:
        pytest.skip("these calls have made-up handles; a live driver must not see them")
    fake = FakeDriver()
    with Device(fake, 0, spec="cuda:0", is_emulated=False) as device:
        _exercise(device)
    names = {name for name, _ in fake.log}
    assert len(names) > 35
    for name, args in fake.log:
        with pytest.raises(RuntimeError):
            getattr(cuda, name)(*args)
