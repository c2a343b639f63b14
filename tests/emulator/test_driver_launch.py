"""Modules, functions, launch rules (cases E08, E09, E10, E19) and occupancy."""

from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.occupancy import occupancy
from smfree.emulator.profile import load as load_profile
from tests.emulator.driver_kit import (
    FakeExecutor,
    cluster_attribute,
    config,
    cooperative_attribute,
    launch,
    load,
    ok,
    open_driver,
    ptx,
    refused,
)

F = cuda.CUfunction_attribute
DYNAMIC = F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

# --- modules


def test_missing_kernel_lists_the_entry_points() -> None:
    driver = open_driver()
    module = ok(driver.cuModuleLoadData(ptx("_Z4workv")))
    refused(
        driver, driver.cuModuleGetFunction(module, b"work"), "NOT_FOUND", "'work'", "_Z4workv", 'extern "C"'
    )


def test_cubin_is_refused_by_name() -> None:
    driver = open_driver()
    refused(driver, driver.cuModuleLoadData(b"\x7fELF\2\1\1"), "NO_BINARY_FOR_GPU", "a cubin", "runs PTX")


def test_ptx_may_come_as_an_address() -> None:
    driver = open_driver()
    text = ctypes.create_string_buffer(ptx())
    assert int(load(driver, ctypes.addressof(text))) != 0


def test_broken_ptx_is_refused_with_its_line() -> None:
    driver = open_driver()
    text = ptx().replace(b"ret;", b"mbarrier.frobnicate.b64 1;")
    refused(driver, driver.cuModuleLoadData(text), "INVALID_PTX", "PTX line 8", "frobnicate")


def test_a_module_with_a_texture_is_refused_by_name() -> None:
    driver = open_driver()
    text = b".version 8.0\n.target sm_90\n.address_size 64\n.global .texref t;\n"
    refused(driver, driver.cuModuleLoadData(text), "NOT_SUPPORTED", "PTX line 4", ".texref")


@pytest.mark.parametrize(
    ("profile", "target", "fits"),
    [
        ("h100", "sm_80", True),
        ("h100", "sm_90", True),
        ("h100", "sm_90a", True),
        ("h100", "sm_100", False),
        ("h100", "sm_100f", False),
        ("a100", "sm_80", True),
        ("a100", "sm_90", False),
        ("a100", "sm_90a", False),
    ],
)
def test_target_must_run_on_the_device(profile: str, target: str, fits: bool) -> None:
    driver = open_driver(profile)
    result = driver.cuModuleLoadData(ptx(target=target))
    if fits:
        ok(result, driver)
    else:
        refused(driver, result, "NO_BINARY_FOR_GPU", target)


def test_globals_are_placed_and_initialised() -> None:
    driver = open_driver()
    variables = ".visible .global .align 4 .u32 counts[4] = {1, 2, 3};"
    module = ok(driver.cuModuleLoadData(ptx(variables=variables)), driver)
    pointer, size = ok(driver.cuModuleGetGlobal(module, b"counts"))
    out = (ctypes.c_uint32 * 4)()
    ok(driver.cuMemcpyDtoH(out, pointer, size))
    assert size == 16 and list(out) == [1, 2, 3, 0]
    refused(driver, driver.cuModuleGetGlobal(module, b"nothing"), "NOT_FOUND", "counts")


def test_launch_passes_the_addresses_of_the_modules_variables() -> None:
    executor = FakeExecutor()
    driver = open_driver(executor=executor)
    module = ok(driver.cuModuleLoadData(ptx(variables=".visible .global .u64 slot;")), driver)
    ok(launch(driver, ok(driver.cuModuleGetFunction(module, b"work"))))
    ok(driver.cuCtxSynchronize())
    assert executor.calls[0].symbols == {"slot": int(ok(driver.cuModuleGetGlobal(module, b"slot"))[0])}


def test_unloaded_module_and_its_functions_are_gone() -> None:
    driver = open_driver()
    module = ok(driver.cuModuleLoadData(ptx(variables=".visible .global .u64 slot;")))
    function = ok(driver.cuModuleGetFunction(module, b"work"))
    ok(driver.cuModuleUnload(module))
    refused(driver, launch(driver, function), "INVALID_HANDLE", "no kernel function")
    refused(driver, driver.cuModuleUnload(module), "INVALID_HANDLE", "no module")
    free, total = ok(driver.cuMemGetInfo())
    assert free == total


def test_stream_handle_as_a_function_is_refused() -> None:
    driver = open_driver()
    refused(driver, launch(driver, ok(driver.cuStreamCreate(0))), "INVALID_HANDLE", "names a Stream")


def test_library_is_loaded_into_the_context_that_asks() -> None:
    executor = FakeExecutor()
    driver = open_driver("h100", "h100", executor=executor)
    library = ok(driver.cuLibraryLoadData(ptx(), None, None, 0, None, None, 0))
    kernel = ok(driver.cuLibraryGetKernel(library, b"work"))
    first = ok(driver.cuKernelGetFunction(kernel))
    assert int(ok(driver.cuKernelGetFunction(kernel))) == int(first)
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(1))))
    second = ok(driver.cuKernelGetFunction(kernel))
    assert int(second) != int(first)
    ok(launch(driver, second))
    ok(driver.cuCtxSynchronize())
    refused(driver, driver.cuLibraryGetKernel(library, b"play"), "NOT_FOUND", "'play'", "work")
    ok(driver.cuLibraryUnload(library))
    refused(driver, launch(driver, second), "INVALID_HANDLE")
    assert len(executor.calls) == 1


# --- registers, attributes


def test_registers_are_unknown_until_they_are_described() -> None:
    driver = open_driver()
    function = load(driver, ptx())
    asked = driver.cuFuncGetAttribute(F.CU_FUNC_ATTRIBUTE_NUM_REGS, function)
    refused(driver, asked, "NOT_SUPPORTED", "work", "describe_function")
    refused(
        driver,
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 128, 0),
        "NOT_SUPPORTED",
        "registers",
    )
    driver.describe_function(function, registers=40, local_bytes=16)
    assert ok(driver.cuFuncGetAttribute(F.CU_FUNC_ATTRIBUTE_NUM_REGS, function)) == 40
    assert ok(driver.cuFuncGetAttribute(F.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function)) == 16


def test_description_by_name_reaches_loaded_and_later_modules_only_of_that_node() -> None:
    driver, other = open_driver(), open_driver()
    before = load(driver, ptx())
    driver.describe_function("work", registers=33)
    after = load(driver, ptx())
    for function in (before, after):
        assert ok(driver.cuFuncGetAttribute(F.CU_FUNC_ATTRIBUTE_NUM_REGS, function)) == 33
    stranger = load(other, ptx())
    refused(other, other.cuFuncGetAttribute(F.CU_FUNC_ATTRIBUTE_NUM_REGS, stranger), "NOT_SUPPORTED")


def test_description_by_handle_leaves_equal_names_alone() -> None:
    driver = open_driver()
    first, second = load(driver, ptx()), load(driver, ptx())
    driver.describe_function(first, registers=50)
    driver.describe_function(second, registers=60)
    assert ok(driver.cuFuncGetAttribute(F.CU_FUNC_ATTRIBUTE_NUM_REGS, first)) == 50


def test_impossible_registers_are_refused() -> None:
    driver = open_driver()
    with pytest.raises(ValueError, match=r"1..255.*got 256"):
        driver.describe_function("work", registers=256)


def test_function_attributes_come_from_the_ptx() -> None:
    driver = open_driver()
    body = ".maxntid 64, 2, 1\n"
    text = ptx(directives=body).replace(b"ret;", b".shared .align 16 .b8 tile[1024];\n  ret;")
    function = load(driver, text)
    get = driver.cuFuncGetAttribute
    assert ok(get(F.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function)) == 128
    assert ok(get(F.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)) == 1024
    assert ok(get(DYNAMIC, function)) == 48 * 1024 - 1024
    assert ok(get(F.CU_FUNC_ATTRIBUTE_PTX_VERSION, function)) == 80
    assert ok(get(F.CU_FUNC_ATTRIBUTE_BINARY_VERSION, function)) == 90
    assert ok(driver.cuFuncGetName(function)) == b"work"


# --- shared memory


def test_more_than_48_kib_needs_the_opt_in() -> None:
    driver = open_driver()
    function = load(driver, ptx())
    ok(launch(driver, function, shared_bytes=48 * 1024))
    report = refused(
        driver, launch(driver, function, shared_bytes=48 * 1024 + 1), "INVALID_VALUE", "49153 bytes"
    )
    assert "MAX_DYNAMIC_SHARED_SIZE_BYTES" in report and "cuFuncSetAttribute" in report
    ok(driver.cuFuncSetAttribute(function, DYNAMIC, 100_000))
    ok(launch(driver, function, shared_bytes=100_000))


def test_opt_in_ends_at_the_devices_limit_less_static_shared_memory() -> None:
    driver = open_driver()
    limit = load_profile("h100").device.shared_bytes_per_block_optin
    function = load(driver, ptx().replace(b"ret;", b".shared .align 16 .b8 tile[1024];\n  ret;"))
    ok(driver.cuFuncSetAttribute(function, DYNAMIC, limit - 1024))
    above = driver.cuFuncSetAttribute(function, DYNAMIC, limit - 1023)
    refused(driver, above, "INVALID_VALUE", f"{limit - 1023} bytes of dynamic and 1024 of static", str(limit))
    refused(
        driver,
        launch(driver, function, shared_bytes=limit),
        "INVALID_VALUE",
        f"limit for the kernel is {limit - 1024}",
    )


# --- grid and block


@pytest.mark.parametrize(
    ("grid", "block", "words"),
    [
        ((0, 1, 1), (32, 1, 1), "gridDim.x must be 1..2147483647, got 0"),
        ((1, 65536, 1), (32, 1, 1), "gridDim.y must be 1..65535, got 65536"),
        ((1, 1, 1), (1025, 1, 1), "blockDim.x must be 1..1024, got 1025"),
        ((1, 1, 1), (1, 1, 65), "blockDim.z must be 1..64, got 65"),
        ((1, 1, 1), (64, 32, 1), "2048 threads per block, the limit is 1024"),
    ],
)
def test_dimension_out_of_range_is_refused(grid: object, block: object, words: str) -> None:
    driver = open_driver()
    refused(driver, launch(driver, load(driver, ptx()), grid=grid, block=block), "INVALID_VALUE", words)


def test_block_must_match_reqntid_and_not_exceed_maxntid() -> None:
    driver = open_driver()
    exact = load(driver, ptx(directives=".reqntid 64, 1, 1"))
    ok(launch(driver, exact, block=(64, 1, 1)))
    refused(driver, launch(driver, exact), "INVALID_VALUE", "exactly (64, 1, 1) threads, not (32, 1, 1)")
    bounded = load(driver, ptx(directives=".maxntid 64, 1, 1"))
    ok(launch(driver, bounded))
    refused(driver, launch(driver, bounded, block=(65, 1, 1)), "INVALID_VALUE", "at most (64, 1, 1)")


def test_registers_that_do_not_fit_a_block_are_refused() -> None:
    driver = open_driver()
    function = load(driver, ptx())
    driver.describe_function(function, registers=128)
    refused(
        driver, launch(driver, function, block=(1024, 1, 1)), "LAUNCH_OUT_OF_RESOURCES", "1024 threads of 128"
    )
    ok(launch(driver, function, block=(512, 1, 1)))


def test_refused_launch_queues_nothing() -> None:
    executor = FakeExecutor()
    driver = open_driver(executor=executor)
    launch(driver, load(driver, ptx()), grid=(0, 1, 1))
    ok(driver.cuCtxSynchronize())
    assert executor.calls == []


# --- the extended launch


def test_attributes_reach_the_executor() -> None:
    executor = FakeExecutor()
    driver = open_driver(executor=executor)
    function = load(driver, ptx(target="sm_90"))
    driver.describe_function(function, registers=32)
    wanted = config((4, 2, 1), attributes=[cluster_attribute(2), cooperative_attribute()])
    ok(driver.cuLaunchKernelEx(wanted, function, None, 0), driver)
    ok(driver.cuCtxSynchronize())
    assert executor.calls[0].cluster == (2, 1, 1) and executor.calls[0].grid == (4, 2, 1)


def test_count_above_the_attribute_list_is_refused() -> None:
    driver = open_driver()
    wanted = config()
    wanted.numAttrs = 1
    refused(
        driver,
        driver.cuLaunchKernelEx(wanted, load(driver, ptx()), None, 0),
        "INVALID_VALUE",
        "numAttrs is 1",
        "0 entries",
    )


def test_programmatic_serialization_is_accepted() -> None:
    driver = open_driver()
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    ok(driver.cuLaunchKernelEx(config(attributes=[attribute]), load(driver, ptx()), None, 0))


def test_attribute_that_is_not_emulated_is_refused_by_name() -> None:
    driver = open_driver()
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT
    result = driver.cuLaunchKernelEx(config(attributes=[attribute]), load(driver, ptx()), None, 0)
    refused(driver, result, "NOT_SUPPORTED", "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT")


def test_compiled_in_cluster_is_used_without_an_attribute() -> None:
    executor = FakeExecutor()
    driver = open_driver(executor=executor)
    function = load(driver, ptx(directives=".explicitcluster\n.reqnctapercluster 2, 1, 1", target="sm_90"))
    ok(launch(driver, function, grid=(4, 1, 1)), driver)
    ok(driver.cuCtxSynchronize())
    assert executor.calls[0].cluster == (2, 1, 1)


def test_compiled_in_cluster_that_conflicts_with_the_attribute_is_refused() -> None:
    driver = open_driver()
    function = load(driver, ptx(directives=".explicitcluster\n.reqnctapercluster 2, 1, 1", target="sm_90"))
    result = driver.cuLaunchKernelEx(config((4, 1, 1), attributes=[cluster_attribute(4)]), function, None, 0)
    refused(driver, result, "INVALID_VALUE", "(2, 1, 1)", "(4, 1, 1)")


def test_grid_that_the_cluster_does_not_divide_is_refused_naming_both() -> None:
    driver = open_driver()
    function = load(driver, ptx(target="sm_90"))
    result = driver.cuLaunchKernelEx(config((6, 1, 1), attributes=[cluster_attribute(4)]), function, None, 0)
    refused(driver, result, "INVALID_VALUE", "grid (6, 1, 1)", "cluster (4, 1, 1)", "6 % 4 = 2")


def test_cluster_above_the_portable_size_needs_the_opt_in() -> None:
    driver = open_driver()
    function = load(driver, ptx(target="sm_90"))
    wanted = config((16, 1, 1), attributes=[cluster_attribute(16)])
    result = driver.cuLaunchKernelEx(wanted, function, None, 0)
    refused(driver, result, "INVALID_CLUSTER_SIZE", "16 CTAs, at most 8")
    ok(driver.cuFuncSetAttribute(function, F.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
    ok(driver.cuLaunchKernelEx(wanted, function, None, 0))


def test_a100_has_no_clusters() -> None:
    driver = open_driver("a100")
    result = driver.cuLaunchKernelEx(
        config((2, 1, 1), attributes=[cluster_attribute(2)]), load(driver, ptx()), None, 0
    )
    refused(driver, result, "NOT_SUPPORTED", "no clusters")


def test_cooperative_launch_must_be_resident_at_once() -> None:
    driver = open_driver()
    function = load(driver, ptx())
    driver.describe_function(function, registers=32)
    capacity = 2 * load_profile("h100").device.num_sms
    fits = config((capacity, 1, 1), (1024, 1, 1), attributes=[cooperative_attribute()])
    ok(driver.cuLaunchKernelEx(fits, function, None, 0), driver)
    above = config((capacity + 1, 1, 1), (1024, 1, 1), attributes=[cooperative_attribute()])
    result = driver.cuLaunchKernelEx(above, function, None, 0)
    refused(driver, result, "COOPERATIVE_LAUNCH_TOO_LARGE", f"{capacity + 1} CTAs", f"{capacity} fit", "2 by")


def test_cooperative_call_checks_residency_too() -> None:
    driver = open_driver()
    function = load(driver, ptx())
    refused(
        driver,
        driver.cuLaunchCooperativeKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, None),
        "NOT_SUPPORTED",
        "a cooperative launch needs the registers",
    )
    driver.describe_function(function, registers=32)
    ok(driver.cuLaunchCooperativeKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, None))
    result = driver.cuLaunchCooperativeKernel(function, 100_000, 1, 1, 32, 1, 1, 0, 0, None)
    refused(driver, result, "COOPERATIVE_LAUNCH_TOO_LARGE", "100000 CTAs")


def test_function_of_another_device_is_refused_in_this_devices_stream() -> None:
    driver = open_driver("h100", "h100")
    function = load(driver, ptx())
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(1))))
    refused(driver, launch(driver, function), "INVALID_HANDLE", "device 0", "device 1")


# --- occupancy


@pytest.mark.parametrize(
    ("threads", "registers", "shared_bytes", "ctas"),
    [
        (256, 32, 0, 8),  # 65536 / (256 * 32), and 2048 threads
        (256, 64, 0, 4),  # registers
        (256, 33, 0, 6),  # 33 registers are allocated as 40: 12 warps per partition
        (32, 32, 0, 32),  # CTA slots
        (1024, 32, 0, 2),  # threads
        (128, 32, 100_000, 2),  # shared memory: 233472 / (100000 + 1024, rounded up to 128)
        (128, 32, 232_448, 1),  # the most a CTA can have
        (128, 32, 232_449, 0),
        (1024, 65, 0, 0),  # 72 * 1024 registers are more than a CTA can have
    ],
)
def test_occupancy_of_h100(threads: int, registers: int, shared_bytes: int, ctas: int) -> None:
    assert occupancy(load_profile("h100").device, threads, registers, shared_bytes).ctas == ctas


def test_occupancy_call_counts_static_and_dynamic_shared_memory() -> None:
    driver = open_driver()
    function = load(driver, ptx().replace(b"ret;", b".shared .align 16 .b8 tile[32768];\n  ret;"))
    driver.describe_function(function, registers=32)
    assert ok(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 128, 0)) == 6
    assert ok(driver.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(function, 128, 32768, 0)) == 3


def test_clusters_on_the_device() -> None:
    driver = open_driver()
    function = load(driver, ptx(target="sm_90"))
    driver.describe_function(function, registers=32)
    wanted = config((8, 1, 1), (1024, 1, 1), attributes=[cluster_attribute(4)])
    sms = load_profile("h100").device.num_sms
    assert ok(driver.cuOccupancyMaxActiveClusters(function, wanted)) == 2 * sms // 4
    assert ok(driver.cuOccupancyMaxPotentialClusterSize(function, wanted)) == 8
    result = driver.cuOccupancyMaxActiveClusters(function, config((8, 1, 1)))
    refused(driver, result, "INVALID_CLUSTER_SIZE", "not compiled for a cluster size")
    ok(driver.cuFuncSetAttribute(function, F.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
    assert ok(driver.cuOccupancyMaxPotentialClusterSize(function, wanted)) == 16
    for directive, size in ((".maxclusterrank 4", 4), (".reqnctapercluster 2, 3, 1", 6)):
        bounded = load(driver, ptx(directives=directive, target="sm_90"))
        driver.describe_function(bounded, registers=32)
        assert ok(driver.cuOccupancyMaxPotentialClusterSize(bounded, wanted)) == size


def test_a_cooperative_launch_of_clusters_fills_no_part_of_one() -> None:
    executor = FakeExecutor()
    driver = open_driver(executor=executor)
    function = load(driver, ptx(target="sm_90"))
    driver.describe_function(function, registers=32)
    attributes = [cluster_attribute(7), cooperative_attribute()]
    sms = load_profile("h100").device.num_sms  # 132 = 18 * 7 + 6, two CTAs of 1024 threads on each
    for clusters, code in ((2 * sms // 7, None), (2 * sms // 7 + 1, "COOPERATIVE_LAUNCH_TOO_LARGE")):
        wanted = config((7 * clusters, 1, 1), (1024, 1, 1), attributes=attributes)
        result = driver.cuLaunchKernelEx(wanted, function, None, 0)
        if code is None:
            ok(result)
        else:
            refused(driver, result, code, f"{7 * clusters} CTAs", f"{2 * sms // 7 * 7} fit")


def test_blocks_that_are_clusters_are_refused_by_name() -> None:
    driver = open_driver()
    text = ptx(directives=".reqntid 32, 1, 1\n.reqnctapercluster 2, 1, 1\n.blocksareclusters", target="sm_90")
    refused(driver, driver.cuModuleLoadData(text), "NOT_SUPPORTED", ".blocksareclusters is not modelled")
