"""Which driver answers: the real one or the emulated GPU. The only module here that knows both."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral
from typing import Any

try:
    from cuda.bindings import driver as real_driver
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "smfree needs cuda-bindings, also without a GPU: pip install 'smfree[cu13]' (or cuda-python and "
        "nvidia-cuda-nvrtc)",
        name=error.name,
    ) from None

from smfree.cuda.errors import DeviceSpecError, NoDeviceError

ENVIRONMENT_VARIABLE = "SMFREE_DEVICE"
DEFAULT_PROFILE = "h100"


class Kind(StrEnum):
    """What a device string asks for."""

    AUTO = "auto"
    CUDA = "cuda"
    EMULATED = "emu"


@dataclass(frozen=True)
class DeviceSpec:
    """A parsed device string: ``auto``, ``cuda:N``, ``emu:PROFILE`` or ``emu:PROFILExN``."""

    kind: Kind
    ordinal: int = 0
    profile: str = ""
    count: int = 1

    def __str__(self) -> str:
        if self.kind is Kind.CUDA:
            return f"cuda:{self.ordinal}"
        if self.kind is Kind.EMULATED:
            return f"emu:{self.profile}" + (f"x{self.count}" if self.count > 1 else "")
        return "auto"


@dataclass(frozen=True)
class Choice:
    """A driver and a device of it. ``spec`` is what was really opened, never ``auto``."""

    driver: Any
    ordinal: int
    spec: str
    is_emulated: bool


def profiles() -> tuple[str, ...]:
    """The GPUs that can be emulated."""
    from smfree.emulator import profile

    return tuple(profile.names())


def parse_spec(text: str | None = None) -> DeviceSpec:
    """Parse a device string; None means ``SMFREE_DEVICE``, else ``auto``. Raises DeviceSpecError with the
    list."""
    if text is not None and not isinstance(text, str):
        raise DeviceSpecError(f"a device is named by a string (got {text!r}); for example cuda:0")
    text = (text if text is not None else os.environ.get(ENVIRONMENT_VARIABLE) or "auto").strip()
    if text == "auto":
        return DeviceSpec(Kind.AUTO)
    if text == "cuda":
        return DeviceSpec(Kind.CUDA)
    real = re.fullmatch(r"cuda:([0-9]+)", text)
    if real:
        return DeviceSpec(Kind.CUDA, ordinal=int(real[1]))
    known = profiles()
    emulated = re.fullmatch(r"emu:([a-z0-9_]+?)(?:x([0-9]+))?", text)
    if emulated and emulated[1] in known:
        count = int(emulated[2] or 1)
        if count != 1:
            raise DeviceSpecError(
                f"several emulated devices ({text!r}) are not supported yet; use emu:{emulated[1]}"
            )
        return DeviceSpec(Kind.EMULATED, profile=emulated[1])
    choices = ", ".join(["auto", "cuda:N", *(f"emu:{name}" for name in known)])
    raise DeviceSpecError(f"unknown device {text!r}; known are {choices}")


def choose(
    text: str | None = None, *, schedule: str = "timed", seed: int = 0, strict: str = "error"
) -> Choice:
    """Pick and initialise a driver. ``schedule`` and ``seed`` go to an emulated GPU only, ``strict`` to no
    other.

    Raises DeviceSpecError for an unknown string, NoDeviceError when ``cuda:N`` is not there.
    """
    spec = parse_spec(text)
    if spec.kind is Kind.EMULATED:
        return _emulated(spec, schedule, seed, strict)
    reason, count = real_devices()
    if spec.kind is Kind.CUDA:
        if reason:
            raise NoDeviceError(
                f"{spec} was asked for, but {reason}; use --device emu:{DEFAULT_PROFILE} instead"
            )
        if spec.ordinal >= count:
            raise NoDeviceError(
                f"{spec} was asked for, but this machine has {count} GPUs: cuda:0 to cuda:{count - 1}"
            )
        return _real(spec.ordinal, strict)
    if not reason:
        return _real(0, strict)
    if "cuInit returned" in reason:
        warnings.warn(f"{reason}; emulating {DEFAULT_PROFILE} instead", RuntimeWarning, stacklevel=3)
    return _emulated(DeviceSpec(Kind.EMULATED, profile=DEFAULT_PROFILE), schedule, seed, strict)


def real_devices(driver: Any = real_driver) -> tuple[str, int]:
    """Initialise the real driver: ``("", count)``, or the reason why there is no GPU and 0.

    ``cuInit`` of cuda-python raises where the driver library is missing.
    """
    try:
        (code,) = driver.cuInit(0)
    except RuntimeError:
        return "this machine has no NVIDIA driver", 0
    name = getattr(code, "name", str(code))
    if name in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY"):
        return "this machine has no NVIDIA GPU", 0
    if int(code) != 0:
        return f"the NVIDIA driver does not start (cuInit returned {name})", 0
    code, count = driver.cuDeviceGetCount()
    if int(code) != 0 or not count:
        return "this machine has no NVIDIA GPU", 0
    return "", int(count)


def _real(ordinal: int, strict: str) -> Choice:
    if strict != "error":
        raise DeviceSpecError(
            f"strict says what an emulated GPU does with its findings (got {strict!r} for cuda:{ordinal}, a "
            f"real one, which finds nothing); leave it out, or open emu:{DEFAULT_PROFILE}"
        )
    return Choice(real_driver, ordinal, f"cuda:{ordinal}", False)


def _emulated(spec: DeviceSpec, schedule: str, seed: int, strict: str) -> Choice:
    from smfree.emulator import profile
    from smfree.emulator.driver import Driver
    from smfree.emulator.exec.schedule import SCHEDULES
    from smfree.emulator.node import Node, Strict

    if schedule not in SCHEDULES:
        raise DeviceSpecError(f"schedule is one of {', '.join(SCHEDULES)} (got {schedule!r})")
    if not isinstance(seed, Integral) or seed < 0:
        raise DeviceSpecError(f"the seed of a schedule is a whole number from 0 on (got {seed!r})")
    if strict not in tuple(Strict):
        raise DeviceSpecError(f"strict is one of {', '.join(Strict)} (got {strict!r})")
    driver = Driver(Node([profile.load(spec.profile)], schedule=schedule, seed=seed, strict=strict))
    return Choice(driver, 0, str(spec), True)
