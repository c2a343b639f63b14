"""cuTensorMapEncodeTiled and ReplaceAddress through the stand-in."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver as cuda

from smfree.emulator.tensormap import MAP_BYTES, decode
from tests.emulator.driver_kit import ok, open_driver, refused
from tests.emulator.test_driver_faults import encode


def content(tensor_map: Any) -> bytes:
    return ctypes.string_at(tensor_map.getPtr(), MAP_BYTES)


def test_map_comes_back_in_the_bindings_own_object() -> None:
    made = ok(encode(open_driver(), address=0x100_0000_0200))
    assert isinstance(made, cuda.CUtensorMap)
    opaque = b"".join(int(word).to_bytes(8, "little") for word in made.opaque)
    assert opaque == content(made)
    found = decode(content(made))
    assert (found.address, found.dims, found.box) == (0x100_0000_0200, (104, 64), (64, 8))


def test_stride_that_is_no_multiple_of_16_is_refused() -> None:
    driver = open_driver()
    refused(driver, encode(driver, width=100), "INVALID_VALUE", "200", "16")


def test_inner_box_above_the_swizzle_span_is_refused() -> None:
    driver = open_driver()
    refused(driver, encode(driver, box=72), "INVALID_VALUE", "144", "128")


def test_short_list_is_refused_by_name() -> None:
    driver = open_driver()
    result = driver.cuTensorMapEncodeTiled(7, 2, 1 << 40, [16, 16], [], [16, 16], [1, 1], 0, 0, 0, 0)
    refused(driver, result, "INVALID_VALUE", "globalStrides must have 1 entries, got 0")


def test_device_without_tma_has_no_tensor_maps() -> None:
    driver = open_driver("a100")
    refused(driver, encode(driver), "NOT_SUPPORTED", "no TMA")


def test_replaced_address_changes_nothing_else() -> None:
    driver = open_driver()
    made = ok(encode(driver))
    ok(driver.cuTensorMapReplaceAddress(made, 0x100_0000_1000), driver)
    assert content(made) == content(ok(encode(driver, address=0x100_0000_1000)))
    before = content(made)
    refused(driver, driver.cuTensorMapReplaceAddress(made, 0x100_0000_1008), "INVALID_VALUE", "16")
    assert content(made) == before
