"""The types that are reduced: how they lie in memory and on the wire, and what numpy calls them."""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kernels.common import ConfigError


class Element(Enum):
    """An element type. ``value``: its name, as torch has it."""

    F32 = "float32"
    F16 = "float16"
    BF16 = "bfloat16"

    @classmethod
    def of(cls, dtype: object) -> Element:
        """For a name, a numpy or torch dtype or an Element. Raises ConfigError."""
        if isinstance(dtype, cls):
            return dtype
        is_numpy = isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic))
        name = np.dtype(dtype).name if is_numpy else str(dtype).removeprefix("torch.")  # type: ignore[call-overload]
        known = [element.value for element in cls]
        if name not in known:
            raise ConfigError(
                f"dtype is one of {', '.join(known)} (got {name!r}); pass such a name, or convert the data"
            )
        return cls(name)

    @property
    def bytes(self) -> int:
        """Of one element."""
        return 4 if self is Element.F32 else 2

    @property
    def bits(self) -> np.dtype[np.unsignedinteger]:
        """The unsigned integers in which the bits of elements are compared and kept."""
        return np.dtype(f"<u{self.bytes}")

    @property
    def define(self) -> str:
        """What kernels call it (``-DELEMENT=``)."""
        return self.name.lower()

    @property
    def unit_roundoff(self) -> float:
        """Half the distance of 1 to the next number: a rounded sum is off by this much of itself, at most."""
        return float(2.0 ** -{Element.F32: 24, Element.F16: 11, Element.BF16: 8}[self])

    def narrow(self, values: NDArray[np.float32]) -> NDArray[np.unsignedinteger]:
        """float32 to the bits of the nearest elements, ties to even."""
        if self is Element.F32:
            return values.view(np.uint32)
        if self is Element.F16:
            with np.errstate(over="ignore"):
                return values.astype(np.float16).view(np.uint16)
        wide = values.view(np.uint32)
        nearest = wide + np.uint32(0x7FFF) + (wide >> np.uint32(16) & np.uint32(1))
        return np.where(np.isnan(values), np.uint32(0x7FFF0000), nearest).__rshift__(16).astype(np.uint16)

    def widen(self, bits: NDArray[np.unsignedinteger]) -> NDArray[np.float32]:
        """Bits of elements to float32, exactly."""
        if self is Element.F32:
            return bits.view(np.float32)
        if self is Element.F16:
            return bits.view(np.float16).astype(np.float32)
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
