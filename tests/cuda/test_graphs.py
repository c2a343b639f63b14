"""CUDA graphs through the host side: replay, forks, what is kept alive, what is refused."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from smfree.cuda import CudaSource, Device, DriverError, Graph, GraphError, Kernel
from tests.cuda.conftest import Opens
from tests.cuda.fake_driver import FakeDriver

N = 256
SOURCE = CudaSource(
    "add.cu",
    text="""extern "C" __global__ void add(unsigned* x, const unsigned* y, unsigned by) {
  x[threadIdx.x] += y[threadIdx.x] + by;
}""",
)


@pytest.fixture
def add(gpu: Device) -> Kernel:
    return gpu.compile(SOURCE).kernel()


def test_graph_replays_kernels_copies_and_fills(gpu: Device, add: Kernel) -> None:
    x, y = (gpu.asarray(np.full(N, value, np.uint32)) for value in (0, 1))
    copy = gpu.empty(N, np.uint32)
    stream = gpu.stream()
    with stream.capture() as graph:
        add.launch(1, N, [x, y, np.uint32(2)], stream=stream)
        copy.copy_from_device(x, stream=stream)
        y.fill(0, stream=stream)
        assert repr(graph) == f"Graph(capturing, device='{gpu.spec}')"
    assert (x.numpy()[0], y.numpy()[0]) == (0, 1), "nothing ran"
    for _ in range(3):
        graph.launch()
    stream.synchronize()
    assert copy.numpy().tolist() == [(1 + 2) + 2 + 2] * N
    assert y.numpy().tolist() == [0] * N


def test_streams_fork_and_join(gpu: Device, add: Kernel) -> None:
    x, y, zero = (gpu.asarray(np.zeros(N, np.uint32)) for _ in range(3))
    first, other = gpu.stream(), gpu.stream(non_blocking=True)
    with first.capture() as graph:
        add.launch(1, N, [x, zero, np.uint32(1)], stream=first)
        other.wait(first.record())
        assert other.graph is graph
        add.launch(1, N, [y, x, np.uint32(0)], stream=other)
        first.wait(other.record())
        add.launch(1, N, [x, y, np.uint32(0)], stream=first)
    assert first.graph is other.graph is None
    graph.launch(other)
    other.synchronize()
    assert (x.numpy()[0], y.numpy()[0]) == (2, 1)


def test_graph_keeps_its_arrays_and_its_module(gpu: Device) -> None:
    """E12."""
    stream = gpu.stream()
    module = gpu.load(gpu.compile_image(SOURCE))
    x, y = (gpu.asarray(np.zeros(N, np.uint32)) for _ in range(2))
    with stream.capture() as graph:
        module.kernel().launch(1, N, [x, y, np.uint32(4)], stream=stream)
    kept = weakref.ref(y.allocation)
    loaded = weakref.ref(module)
    del module, y
    gc.collect()
    graph.launch()
    stream.synchronize()
    assert x.numpy()[0] == 4
    assert kept() is not None and loaded() is not None
    graph.close()
    gc.collect()
    assert kept() is None and loaded() is None


def test_launched_graph_lives_until_its_stream_is_waited_for(gpu: Device, add: Kernel) -> None:
    stream = gpu.stream()
    x, y = (gpu.asarray(np.zeros(N, np.uint32)) for _ in range(2))
    with stream.capture() as graph:
        add.launch(1, N, [x, y, np.uint32(1)], stream=stream)
    graph.launch()
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is not None
    stream.synchronize()
    gc.collect()
    assert alive() is None
    assert x.numpy()[0] == 1


def test_what_is_collected_in_a_capture_is_freed_after_it(h100: Device) -> None:
    """Freeing is forbidden to the capturing thread; a dropped array must not break the capture."""
    x = h100.asarray(np.zeros(N, np.uint32))
    used = h100.emulator.memory.allocated_bytes
    dropped, stream = h100.empty(N), h100.stream()
    with stream.capture() as graph:
        del dropped
        gc.collect()
        x.fill(1, stream=stream)
        assert h100.emulator.memory.allocated_bytes > used
    assert h100.emulator.memory.allocated_bytes == used
    graph.launch()
    stream.synchronize()
    assert x.numpy().tolist() == [0x01010101] * N


def test_graph_of_freed_memory_is_refused(gpu: Device, add: Kernel) -> None:
    stream = gpu.stream()
    x, y = (gpu.asarray(np.zeros(N, np.uint32)) for _ in range(2))
    with stream.capture() as graph:
        add.launch(1, N, [x, y, np.uint32(1)], stream=stream)
    y.free()
    with pytest.raises(GraphError, match=r"whose memory was freed \(1024 bytes at 0x.*keep the arrays"):
        graph.launch()


def test_graph_is_launched_after_its_capture_only(gpu: Device) -> None:
    stream = gpu.stream()
    graph = stream.capture()
    with pytest.raises(GraphError, match=r"not captured.*leave the capturing block first"):
        graph.launch()
    with graph, pytest.raises(GraphError, match=r"capturing.*leave the capturing block first"):
        graph.launch()
    graph.launch()
    with pytest.raises(GraphError, match="captured once"), graph:
        pass
    graph.close()
    with pytest.raises(GraphError, match="it was closed"):
        graph.launch()


def test_error_in_the_block_is_the_error(gpu: Device) -> None:
    stream = gpu.stream()
    with pytest.raises(ZeroDivisionError), stream.capture() as graph:
        raise ZeroDivisionError
    assert not graph.ready
    assert stream.graph is None
    x = gpu.empty(4).fill(3, stream=stream)
    stream.synchronize()
    assert x.numpy().tolist() == [3] * 4


@pytest.mark.parametrize("what", ["synchronize", "allocate", "unjoined", "outside", "default"])
def test_forbidden_in_a_capture(gpu: Device, what: str) -> None:
    """The stream is usable again afterwards."""
    stream, other = gpu.stream(), gpu.stream()
    x = gpu.asarray(np.zeros(4, np.uint8))
    outside = other.record()

    def misuse() -> None:
        if what == "synchronize":
            stream.synchronize()
        elif what == "allocate":
            gpu.empty(4)
        elif what == "unjoined":
            other.wait(stream.record())
            x.fill(1, stream=other)
        elif what == "outside":
            stream.wait(outside)
        else:
            x.fill(1)

    code, words = {
        "synchronize": ("STREAM_CAPTURE_UNSUPPORTED", "end the capture first"),
        "allocate": ("STREAM_CAPTURE_UNSUPPORTED", "cuMemAlloc while stream"),
        "unjoined": ("STREAM_CAPTURE_UNJOINED", "memset of 4 bytes"),
        "outside": ("STREAM_CAPTURE_ISOLATION", "record the event in the capture"),
        "default": ("STREAM_CAPTURE_IMPLICIT", "the default stream waits for"),
    }[what]
    with pytest.raises(DriverError) as caught, stream.capture():
        misuse()
    assert caught.value.code_name == f"CUDA_ERROR_{code}"
    if gpu.is_emulated:  # a real driver gives the code alone
        assert words in str(caught.value)
    with stream.capture() as graph:
        x.fill(2, stream=stream)
    graph.launch()
    stream.synchronize()
    assert x.numpy().tolist() == [2] * 4


def test_default_stream_and_foreign_streams_are_refused(gpus: Opens) -> None:
    one, other = gpus(2)
    with pytest.raises(GraphError, match=r"default stream cannot be captured; use device.stream\(\)"):
        one.default_stream.capture()
    with one.stream().capture() as graph:
        pass
    with pytest.raises(GraphError, match=f"the stream belongs to {other.spec}, the graph to {one.spec}"):
        graph.launch(other.stream())


def test_graph_across_devices(gpus: Opens) -> None:
    pair = gpus(2)
    first, other = (device.stream() for device in pair)
    arrays = [device.asarray(np.zeros(4, np.uint8)) for device in pair]
    with first.capture() as graph:
        arrays[0].fill(1, stream=first)
        other.wait(first.record())
        arrays[1].fill(2, stream=other)
        first.wait(other.record())
    graph.launch()
    first.synchronize()
    assert [array.numpy()[0] for array in arrays] == [1, 2]


def test_calls_of_a_capture_on_a_real_driver(fake: FakeDriver) -> None:
    """Begin, end, instantiate, destroy the template; the mode protects this thread's capture only."""
    with Device(fake, 0, spec="cuda:0", is_emulated=False) as device:
        stream = device.stream()
        with stream.capture() as graph:
            pass
        graph.upload()
        graph.launch()
        graph.close()
    graph_calls = [api for api, _ in fake.log if "Graph" in api or "Capture" in api]
    assert graph_calls == [
        "cuStreamBeginCapture",
        "cuStreamEndCapture",
        "cuGraphInstantiate",
        "cuGraphDestroy",
        "cuGraphUpload",
        "cuGraphLaunch",
        "cuGraphExecDestroy",
    ]
    (begin,) = fake.calls("cuStreamBeginCapture")
    assert begin[1] is fake.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def test_closed_device_closes_its_graphs(fake: FakeDriver) -> None:
    with Device(fake, 0, spec="cuda:0", is_emulated=False) as device, device.stream().capture() as graph:
        pass
    assert isinstance(graph, Graph) and not graph.ready
    assert len(fake.calls("cuGraphExecDestroy")) == 1
