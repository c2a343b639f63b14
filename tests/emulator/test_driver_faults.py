"""A kernel's fault is sticky and its report says which launch (cases E15, E18); tensor maps."""

from __future__ import annotations

from typing import Any

import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.errors import (
    BarrierFault,
    CopyFault,
    Deadlock,
    EmulationError,
    MemoryFault,
    Severity,
    Unsupported,
)
from tests.emulator.driver_kit import FakeExecutor, launch, load, ok, open_driver, ptx, refused


def raising(error: EmulationError) -> FakeExecutor:
    def effect(device: Any, params: bytes) -> None:
        raise error

    return FakeExecutor(effect=effect)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryFault("load outside", rule="memory.bounds"), "ILLEGAL_ADDRESS"),
        (MemoryFault("load misaligned", rule="memory.misaligned"), "MISALIGNED_ADDRESS"),
        (CopyFault("source misaligned", rule="bulk.align"), "MISALIGNED_ADDRESS"),
        (CopyFault("read before completion", rule="copy.race"), "LAUNCH_FAILED"),
        (BarrierFault("too many arrivals", rule="mbarrier.overflow"), "LAUNCH_FAILED"),
        (Deadlock("full[1], phase 2: 512 of 1024 bytes missing"), "LAUNCH_TIMEOUT"),
        (Unsupported("no clusters yet"), "NOT_SUPPORTED"),
    ],
)
def test_fault_surfaces_at_the_synchronisation_with_hardwares_code(error: EmulationError, code: str) -> None:
    driver = open_driver(executor=raising(error))
    ok(launch(driver, load(driver, ptx()), grid=(3, 1, 1)))
    refused(driver, driver.cuCtxSynchronize(), code, error.message, "kernel work (grid (3, 1, 1)")


def test_report_names_place_launch_and_calling_line() -> None:
    error = MemoryFault("load of 4 bytes outside every allocation", rule="memory.bounds")
    driver = open_driver(executor=raising(error.locate("CTA 1 thread 7, copy.cu:12")))
    ok(launch(driver, load(driver, ptx())))
    driver.cuCtxSynchronize()
    report = driver.report()
    assert "at CTA 1 thread 7, copy.cu:12" in report
    assert "on the default stream, launched at driver_kit.py:" in report


def test_every_later_call_returns_the_same_code() -> None:
    driver = open_driver(executor=raising(Deadlock("nobody arrives")))
    function, pointer = load(driver, ptx()), ok(driver.cuMemAlloc(16))
    event = ok(driver.cuEventCreate(0))
    ok(launch(driver, function))
    refused(driver, driver.cuCtxSynchronize(), "LAUNCH_TIMEOUT")
    later = [
        driver.cuMemAlloc(16),
        driver.cuMemcpyHtoD(pointer, bytes(4), 4),
        driver.cuStreamCreate(0),
        driver.cuEventRecord(event, 0),
        driver.cuEventQuery(event),
        driver.cuModuleLoadData(ptx()),
        launch(driver, function),
        encode(driver),
    ]
    for result in later:
        report = refused(driver, result, "LAUNCH_TIMEOUT", "an earlier fault is sticky", "nobody arrives")
    assert "kernel work" in report


def test_fault_drops_what_was_queued_behind_it() -> None:
    executor = raising(MemoryFault("load outside", rule="memory.bounds"))
    driver = open_driver(executor=executor)
    function = load(driver, ptx())
    for _ in range(3):
        ok(launch(driver, function))
    refused(driver, driver.cuCtxSynchronize(), "ILLEGAL_ADDRESS")
    assert len(executor.calls) == 1


def test_fault_kills_one_device_only() -> None:
    driver = open_driver("h100", "h100", executor=raising(Deadlock("nobody arrives")))
    ok(launch(driver, load(driver, ptx())))
    refused(driver, driver.cuCtxSynchronize(), "LAUNCH_TIMEOUT")
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(1))))
    ok(driver.cuCtxSynchronize())
    ok(driver.cuMemAlloc(16))


def test_refusal_is_not_sticky() -> None:
    driver = open_driver()
    refused(driver, driver.cuMemAlloc(0), "INVALID_VALUE")
    ok(driver.cuMemAlloc(16))


def test_bug_in_the_executor_is_raised_not_turned_into_a_code() -> None:
    def effect(device: Any, params: bytes) -> None:
        raise ZeroDivisionError("a bug")

    driver = open_driver(executor=FakeExecutor(effect=effect))
    ok(launch(driver, load(driver, ptx())))
    with pytest.raises(ZeroDivisionError):
        driver.cuCtxSynchronize()


@pytest.mark.parametrize(
    ("strict", "raised", "kept"), [("error", True, 0), ("record", False, 1), ("off", False, 0)]
)
def test_strict_findings_are_raised_recorded_or_ignored(strict: str, raised: bool, kept: int) -> None:
    node = open_driver(strict=strict).node
    finding = CopyFault("usually forgiven", rule="copy.strict", severity=Severity.STRICT)
    try:
        node.found(finding)
        assert not raised
    except CopyFault:
        assert raised
    assert len(node.findings) == kept
    with pytest.raises(CopyFault):
        node.found(CopyFault("never forgiven", rule="copy.error"))


# --- tensor maps


def encode(driver: Any, width: int = 104, address: int = 1 << 40, box: int = 64) -> Any:
    u64, u32 = cuda.cuuint64_t, cuda.cuuint32_t
    return driver.cuTensorMapEncodeTiled(
        cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        2,
        address,
        [u64(width), u64(64)],
        [u64(2 * width)],
        [u32(box), u32(8)],
        [u32(1), u32(1)],
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
