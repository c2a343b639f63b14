"""Versions that a result depends on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any

#: Distribution names by what they provide; the first one installed counts.
_DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "smfree": ("smfree",),
    "cuda-bindings": ("cuda-bindings",),
    "nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "triton": ("triton",),
    "torch": ("torch",),
    "numpy": ("numpy",),
}


@cache
def _installed(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def versions(device: Any) -> dict[str, str]:
    """Versions of packages and of the driver; parts that are absent are left out."""
    found = {part: _installed(names) for part, names in _DISTRIBUTIONS.items()}
    found["driver_cuda"] = ".".join(str(part) for part in device.driver_version)
    return {part: version for part, version in found.items() if version}
