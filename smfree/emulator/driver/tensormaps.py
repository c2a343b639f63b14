"""Tensor maps through the driver's calls; the rules themselves are in smfree.emulator.tensormap."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from cuda.bindings import driver as cuda

from smfree.emulator import tensormap
from smfree.emulator.driver.base import DriverBase, entry
from smfree.emulator.driver.errors import invalid, unsupported
from smfree.emulator.driver.memory import address_of
from smfree.emulator.errors import CopyFault, Unsupported

_Made = TypeVar("_Made")


class TensorMapCalls(DriverBase):
    """cuTensorMapEncodeTiled and cuTensorMapReplaceAddress."""

    @entry(1)
    def cuTensorMapEncodeTiled(
        self,
        tensorDataType: Any,
        tensorRank: Any,
        globalAddress: Any,
        globalDim: Any,
        globalStrides: Any,
        boxDim: Any,
        elementStrides: Any,
        interleave: Any,
        swizzle: Any,
        l2Promotion: Any,
        oobFill: Any,
    ) -> Any:
        self._needs_tensor_maps()
        rank = int(tensorRank)
        if not 1 <= rank <= 5:
            raise invalid(f"tensorRank must be 1..5, got {rank}")
        encoded = _refusing(
            lambda: tensormap.encode(
                int(tensorDataType),
                address_of(globalAddress),
                _list("globalDim", globalDim, rank),
                _list("globalStrides", globalStrides, rank - 1),
                _list("boxDim", boxDim, rank),
                _list("elementStrides", elementStrides, rank),
                interleave=int(interleave),
                swizzle=int(swizzle),
                l2_promotion=int(l2Promotion),
                oob_fill=int(oobFill),
            )
        )
        return _as_object(encoded)

    @entry(0)
    def cuTensorMapReplaceAddress(self, tensorMap: Any, globalAddress: Any) -> None:
        self._needs_tensor_maps()
        if tensorMap is None:
            raise invalid("tensorMap is None")
        old = _refusing(lambda: tensormap.decode(ctypes.string_at(tensorMap.getPtr(), tensormap.MAP_BYTES)))
        encoded = _refusing(
            lambda: tensormap.encode(
                int(old.data_type),
                address_of(globalAddress),
                old.dims,
                old.strides[1:],
                old.box,
                old.element_strides,
                swizzle=int(old.swizzle),
                oob_fill=int(old.fill_nan),
            )
        )
        ctypes.memmove(tensorMap.getPtr(), encoded, tensormap.MAP_BYTES)

    def _needs_tensor_maps(self) -> None:
        spec = self._device().profile.device
        if spec.compute_major < 9:
            raise unsupported(
                f"{spec.name} (sm_{spec.compute_major}{spec.compute_minor}) has no TMA, so no tensor maps"
            )


def _refusing(make: Callable[[], _Made]) -> _Made:
    """Turn a broken rule into CUDA_ERROR_INVALID_VALUE with the rule as its report."""
    try:
        return make()
    except (CopyFault, Unsupported) as error:
        raise invalid(str(error)) from None


def _list(name: str, values: Sequence[Any] | None, count: int) -> list[int]:
    """The first ``count`` entries as ints; the real binding takes lists or tuples of wrappers."""
    if len(values or ()) < count:
        raise invalid(f"{name} must have {count} entries, got {len(values or ())}")
    return [int(value) for value in (values or ())[:count]]


def _as_object(encoded: bytes) -> Any:
    """A CUtensorMap that holds the 128 bytes."""
    made = cuda.CUtensorMap()
    ctypes.memmove(made.getPtr(), encoded, tensormap.MAP_BYTES)
    return made
