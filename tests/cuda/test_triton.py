"""Triton kernels: compilation without a GPU, specialisation, descriptors, and the launch's extra
arguments."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import triton
from triton.runtime import _allocation, driver

from smfree.cuda import (
    ArgumentError,
    ArrayError,
    CompileCache,
    CompileError,
    Device,
    LaunchError,
    ModuleImage,
    TritonDescriptor,
    TritonError,
    TritonSource,
    compile_triton,
    triton_unavailable,
)
from tests.cuda import triton_kernels as kernels
from tests.cuda.fake_driver import FakeDriver

HOPPER = (9, 0)


def pointer_source(divisible: tuple[str, ...] = ("dst", "src", "n"), **options: Any) -> TritonSource:
    """The pointer copy of i32, blocks of 1024."""
    signature = {"dst": "*i32", "src": "*i32", "n": "i32"}
    return TritonSource(kernels.copy_pointers, signature, {"BLOCK": 1024}, divisible, **options)


def descriptor_source(dtype: str = "fp32", rows: int = 64, cols: int = 64, **options: Any) -> TritonSource:
    """The descriptor copy."""
    kind = f"tensordesc<{dtype}[{rows}, {cols}]>"
    constants = {"ROWS": rows, "COLS": cols}
    return TritonSource(kernels.copy_descriptors, {"dst": kind, "src": kind}, constants, **options)


@pytest.mark.parametrize(
    ("found", "reason"), [((), "found none"), ((3, 1, 0), "found 3.1.0"), ((2, 3), "found 2.3")]
)
def test_missing_or_old_triton_names_needed_and_found(found: tuple[int, ...], reason: str) -> None:
    """F01: host descriptors need 3.6; the message is what a benchmark skips with."""
    text = triton_unavailable(found)
    assert text is not None and "needs triton 3.6 or newer" in text and reason in text


def test_installed_triton_is_usable() -> None:
    """F01: from 3.6 on there is no reason."""
    assert triton_unavailable((3, 6, 0)) is None and triton_unavailable((4, 0)) is None
    assert triton_unavailable() is None


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_compiles_for_every_generation_without_a_gpu(capability: tuple[int, int]) -> None:
    image = compile_triton(pointer_source(), capability)
    assert f".target sm_{capability[0]}{capability[1]}" in image.ptx and image.cubin[:4] == b"\x7fELF"
    facts = image.functions["copy_pointers"]
    assert facts.required_block == (128, 1, 1) and facts.registers > 0 and facts.spill_bytes == 0
    assert [p.size_bytes for p in facts.params] == [8, 8, 4, 8, 8]
    assert image.metadata["shared"] == 0 and image.metadata["num_warps"] == 4


def test_specialisation_vectorises_and_its_absence_does_not() -> None:
    """A scalar Triton kernel against a vector CUDA one would be no comparison."""
    vector = compile_triton(pointer_source(), HOPPER).sass_counts()
    scalar = compile_triton(pointer_source(()), HOPPER).sass_counts()
    assert vector.get("LDG.E.128") == vector.get("STG.E.128") == 2
    assert "LDG.E.128" not in scalar and scalar["LDG.E"] == 8


def test_specialisation_is_the_jits(device: Device) -> None:
    array = device.empty(64, np.int32)
    chosen = TritonSource.for_arguments(
        kernels.copy_pointers, {"dst": array, "src": array[1:], "n": 48}, {"BLOCK": 1024}
    )
    assert dict(chosen.signature) == {"dst": "*i32", "src": "*i32", "n": "i32", "BLOCK": "constexpr"}
    assert chosen.divisible_by_16 == {"dst", "n"} and chosen.runtime_names == ("dst", "src", "n")
    one = TritonSource.for_arguments(
        kernels.copy_pointers, {"dst": array, "src": array, "n": 1}, {"BLOCK": 1024}
    )
    assert dict(one.constexprs) == {"n": 1, "BLOCK": 1024} and one.runtime_names == ("dst", "src")
    wide = TritonSource.for_arguments(
        kernels.copy_pointers, {"dst": array, "src": array, "n": 2**31}, {"BLOCK": 1024}
    )
    assert dict(wide.signature)["n"] == "i64"


def test_cache_tells_specialisations_apart_and_survives_a_restart(tmp_path: Any) -> None:
    cache = CompileCache(tmp_path)
    first = compile_triton(pointer_source(), HOPPER, cache=cache)
    again = compile_triton(pointer_source(), HOPPER, cache=cache)
    assert again == first and again.from_cache and not first.from_cache
    for other in (pointer_source(()), pointer_source(num_warps=8), pointer_source(num_stages=2)):
        assert not compile_triton(other, HOPPER, cache=cache).from_cache
    assert not compile_triton(pointer_source(), (8, 0), cache=cache).from_cache


def test_compilation_warns_of_nothing(tmp_path: Any) -> None:
    """Triton 3.9 warns about its floating-point fusion default unless it is set; smfree sets it per
    kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_triton(pointer_source(num_warps=2), HOPPER, cache=CompileCache(tmp_path))


def test_nothing_global_is_changed_by_compiling_and_launching(device: Device, tmp_path: Any) -> None:
    """F10: Triton's allocator and active driver are one global setting each; smfree uses its own launcher."""

    def mark(size: int, align: int, stream: int | None) -> object:
        raise AssertionError("the user's allocator was called")

    before = _allocation._allocator.get()
    triton.set_allocator(mark)
    try:
        device.cache = CompileCache(tmp_path)
        array = device.empty(2048, np.int32)
        device.compile(pointer_source()).kernel().launch(2, None, [array, array, 2048])
        assert _allocation._allocator.get() is mark
        assert driver._active is None
    finally:
        triton.set_allocator(before)


def test_error_of_the_compiler_is_carried() -> None:
    source = TritonSource(kernels.broken, {"dst": "*fp32"}, {"BLOCK": 16})
    with pytest.raises(CompileError, match=r"cannot compile broken for compute capability 9.0") as caught:
        compile_triton(source, HOPPER)
    assert "num_warps=4" in str(caught.value) and caught.value.log


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"signature": {"dst": "*i32", "src": "*i32"}}, "names .* the function takes"),
        (
            {"signature": {"dst": "*i32", "src": "*i32", "n": "i32", "x": "i32"}},
            "names .* the function takes",
        ),
        (
            {"constexprs": {}, "signature": {"dst": "*i32", "src": "*i32", "n": "i32", "BLOCK": "constexpr"}},
            "BLOCK has no value",
        ),
        ({"num_stages": 0}, r"num_stages is at least 1 \(got 0\)"),
        ({"num_warps": 3}, r"num_warps is a power of two \(got 3\)"),
    ],
)
def test_wrong_sources_are_refused_before_compiling(arguments: dict, message: str) -> None:
    good: dict = {"signature": {"dst": "*i32", "src": "*i32", "n": "i32"}, "constexprs": {"BLOCK": 1024}}
    TritonSource(kernels.copy_pointers, **good)
    with pytest.raises(TritonError, match=message):
        TritonSource(kernels.copy_pointers, **(good | arguments))


def test_plain_function_is_no_kernel() -> None:
    with pytest.raises(TritonError, match=r"decorate it with @triton\.jit"):
        TritonSource(lambda dst: None, {"dst": "*i32"})


# --- descriptors ----------------------------------------------------------------------------------


def test_descriptor_of_an_array_is_accepted(device: Device) -> None:
    """F03, the clean twin: aligned base, 16-byte strides, dense rows, block rows of 16 bytes and more."""
    made = TritonDescriptor(device.empty((128, 64), np.float16), (32, 8))
    assert made.element_strides == (64, 1) and made.type_name == "tensordesc<fp16[32, 8]>"


def _refused(device: Device, shape: tuple, dtype: Any, block: tuple, **more: Any) -> None:
    TritonDescriptor(device.empty(shape, dtype), block, **more)


@pytest.mark.parametrize(
    ("shape", "dtype", "block", "more", "message"),
    [
        (
            (64, 60),
            np.uint8,
            (32, 32),
            {},
            r"stride of dimension 0 is a multiple of 16 bytes \(got 60 bytes\)",
        ),
        ((64, 64), np.float32, (32, 32), {"strides": (66, 1)}, r"\(got 264 bytes\)"),
        ((64, 64), np.float32, (32, 32), {"strides": (64, 2)}, r"innermost stride is 1 element \(got 2\)"),
        ((64, 64), np.float32, (32, 2), {}, r"a block row has at least 16 bytes \(got 8\)"),
        ((64, 64), np.float32, (32, 48), {}, r"block edges are powers of two \(got \(32, 48\)\)"),
        ((64, 64), np.float32, (32,), {}, "as many block edges"),
        ((2,) * 6, np.float32, (2,) * 6, {}, "1 to 5 dimensions"),
        ((0, 64), np.float32, (32, 32), {}, r"no empty dimension \(got \(0, 64\)\)"),
        ((64, 64), np.int32, (32, 32), {"padding": "nan"}, "'nan' for floats"),
    ],
)
def test_descriptor_that_would_fault_is_refused_before_compiling(
    device: Device, shape: tuple, dtype: Any, block: tuple, more: dict, message: str
) -> None:
    """F03: Triton's frontend lets an unaligned stride pass; the device faults."""
    with pytest.raises(ArrayError, match=message):
        TritonDescriptor(device.empty(shape, dtype), block, **more)


def test_descriptor_with_a_misaligned_base_is_refused(device: Device) -> None:
    """F03: base not 16-byte aligned."""
    view = device.empty(8192 + 64).bytes_view(8, 8192).view(np.float32, (32, 64))
    with pytest.raises(
        ArrayError, match=r"16-byte aligned .got address ending in 0x8.; offset the view by a multiple of 4"
    ):
        TritonDescriptor(view, (32, 32))


def test_wrapper_says_which_kind_of_descriptor_it_needs(device: Device) -> None:
    """F05: an array where a host descriptor is wanted, and the reverse."""
    array = device.empty((64, 64), np.float32)
    made = TritonDescriptor(array, (64, 64))
    with_maps = device.compile(descriptor_source()).kernel()
    with pytest.raises(
        ArgumentError,
        match=r"argument src of copy_descriptors is a host tensor descriptor .*pass a TritonDescriptor",
    ):
        with_maps.launch((1, 1), None, [made, array])
    pointers = device.compile(pointer_source()).kernel()
    with pytest.raises(ArgumentError, match=r"argument dst of copy_pointers is \*i32.*not a host descriptor"):
        pointers.launch(1, None, [made, array, 16])
    smaller = TritonDescriptor(array, (32, 64))
    with pytest.raises(ArgumentError, match=r"is tensordesc<fp32\[64, 64\]>, got tensordesc<fp32\[32, 64\]>"):
        with_maps.launch((1, 1), None, [made, smaller])


def test_host_and_device_made_descriptors_compile_to_one_path(device: Device) -> None:
    """F05 (compile side): the device-made kind takes plain pointers and scratch memory, the host kind
    maps."""
    signature = {"dst": "*fp32", "src": "*fp32", "rows": "i32", "cols": "i32"}
    made = TritonSource(
        kernels.device_descriptors, signature, {"ROWS": 64, "COLS": 32}, ("dst", "src", "rows", "cols")
    )
    image = compile_triton(made, HOPPER)
    assert image.metadata["global_scratch_size"] >= 256 and not image.metadata["tensordesc_meta"]  # type: ignore[operator]
    assert "tensormap.replace" in image.ptx
    assert "tensormap.replace" not in compile_triton(descriptor_source(), HOPPER).ptx


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("cols", [4, 16, 32])
def test_small_tiles_compile_at_every_pipeline_depth(cols: int, stages: int) -> None:
    """F06: tiles of 16 to 128 bytes per row, one to four stages: shared memory keeps each stage 128-byte
    aligned."""
    source = TritonSource(
        kernels.sum_descriptors,
        {"out": "*fp32", "src": f"tensordesc<fp32[8, {cols}]>", "steps": "i32"},
        {"ROWS": 8, "COLS": cols, "STAGES": stages},
        ("out",),
        num_stages=stages,
        num_warps=1,
    )
    image = compile_triton(source, HOPPER)
    assert image.sass().stems()["UTMALDG"] >= 1
    assert int(image.metadata["shared"]) >= 8 * cols * 4 * max(stages - 1, 1)  # type: ignore[call-overload]


def test_descriptor_becomes_a_map_in_the_compilers_layout(device: Device, fake: FakeDriver) -> None:
    """64 x 64 fp32 becomes boxes of [64, 32] with a 128-byte swizzle, followed by shape and strides."""
    kernel = device.compile(descriptor_source()).kernel()
    src, dst = device.empty((256, 192), np.float32), device.empty((256, 192), np.float32)
    kernel.launch(
        (4, 3), None, [TritonDescriptor(dst, (64, 64)), TritonDescriptor(src, (64, 64), padding="nan")]
    )
    target, origin = fake.maps
    assert (target["base"], origin["base"]) == (dst.ptr, src.ptr)
    assert origin["dims"] == [192, 256] and origin["strides"] == [768] and origin["box"] == [32, 64]
    assert target["rest"] == (0, 3, 2, 0) and origin["rest"] == (0, 3, 2, 1)
    ((config, *_),) = fake.calls("cuLaunchKernelEx")
    assert (config.gridDimX, config.gridDimY, config.blockDimX) == (4, 3, 128)
    assert config.sharedMemBytes == kernel.module.image.metadata["shared"] != 0


def test_expanded_arguments_fit_the_compiled_parameters(device: Device) -> None:
    """With maps (sm_90) and decomposed (sm_80): sizes, order and the two scratch pointers."""
    from smfree.cuda.arguments import pack
    from smfree.cuda.launch import LaunchShape
    from smfree.cuda.triton_launch import expand

    shape = LaunchShape((1, 1, 1), (128, 1, 1))
    for capability in (8, 9):
        own = Device(FakeDriver(COMPUTE_CAPABILITY_MAJOR=capability), 0, spec="cuda:0", is_emulated=False)
        kernel = own.compile(descriptor_source()).kernel()
        made = TritonDescriptor(own.empty((256, 192), np.float32), (64, 64))
        _, args = expand(kernel, shape, [made, made])
        assert len(args) == len(kernel.facts.params)
        packed = pack("k", kernel.facts.params, args, own).tobytes()
        offsets = [p.offset for p in kernel.facts.params]
        if capability == 9:
            values = np.frombuffer(packed, np.int32, 2, offsets[1]).tolist()
            assert values == [256, 192]
            assert np.frombuffer(packed, np.int64, 2, offsets[3]).tolist() == [192, 1]
        else:
            assert np.frombuffer(packed, np.int64, 5, 0).tolist() == [made.array.ptr, 256, 192, 192, 1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (lambda a: [a, a], r"takes 3 arguments \(dst: \*i32, src: \*i32, n: i32\), got 2"),
        (
            lambda a: [a, a[1:], 1024],
            "argument src .*compiled as a multiple of 16 .got address ending in 0x4",
        ),
        (lambda a: [a, a, 1000], r"argument n .*multiple of 16 \(got 1000\)"),
        (lambda a: [a, a.view(np.float32), 1024], r"argument src .* is \*i32, got an array of float32"),
        (lambda a: [a, a, 2**31], "i32: 2147483648 does not fit"),
        (lambda a: [a, a, 16.0], "argument n .* is i32 .got float 16.0"),
    ],
)
def test_arguments_that_break_the_specialisation_are_refused(device: Device, args: Any, message: str) -> None:
    array = device.empty(1024, np.int32)
    kernel = device.compile(pointer_source()).kernel()
    with pytest.raises(ArgumentError, match=message):
        kernel.launch(1, None, args(array))


def test_triton_decides_shared_memory_and_block(device: Device) -> None:
    array = device.empty(1024, np.int32)
    kernel = device.compile(pointer_source()).kernel()
    with pytest.raises(LaunchError, match=r"Triton decides shared memory"):
        kernel.launch(1, None, [array, array, 1024], shared_bytes=128)
    with pytest.raises(LaunchError, match=r"blocks of exactly"):
        kernel.launch(1, 64, [array, array, 1024])


def test_several_ctas_per_program_launch_as_clusters(device: Device, fake: FakeDriver) -> None:
    array = device.empty(4096, np.int32)
    kernel = device.compile(pointer_source(num_ctas=2)).kernel()
    kernel.launch((3, 2), None, [array, array, 4096])
    ((config, *_),) = fake.calls("cuLaunchKernelEx")
    assert (config.gridDimX, config.gridDimY) == (6, 2)
    assert kernel.facts.cluster_dims in (None, (2, 1, 1))
    assert config.numAttrs == 1 and config.attrs[0].value.clusterDim.x == 2


def test_scratch_memory_is_allocated_per_cta_and_kept(device: Device, fake: FakeDriver) -> None:
    signature = {"dst": "*fp32", "src": "*fp32", "rows": "i32", "cols": "i32"}
    made = TritonSource(kernels.device_descriptors, signature, {"ROWS": 64, "COLS": 32})
    module = device.compile(made)
    size = int(module.image.metadata["global_scratch_size"])  # type: ignore[call-overload]
    array = device.empty((128, 64), np.float32)
    module.kernel().launch((2, 2), None, [array, array, 128, 64])
    assert fake.calls("cuMemAlloc")[-1] == (4 * size,)
    assert len(fake.memory) == 2
    device.synchronize()
    assert len(fake.memory) == 1


def test_scalars_take_their_type_from_the_signature(device: Device) -> None:
    signature = {"dst": "*fp64", "a": "i64", "b": "fp32", "c": "u8", "d": "fp64"}
    image: ModuleImage = compile_triton(TritonSource(kernels.add_scalars, signature), HOPPER)
    assert [p.size_bytes for p in image.functions["add_scalars"].params][:5] == [8, 8, 4, 1, 8]
    kernel = device.load(image).kernel()
    array = device.empty(1, np.float64)
    kernel.launch(1, None, [array, 5, 2.5, 3, 1])
    with pytest.raises(ArgumentError, match=r"argument a .* is i64 .got float"):
        kernel.launch(1, None, [array, 5.5, 2.5, 3, 1])
