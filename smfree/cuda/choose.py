"""Which driver answers: the real one or the emulated GPU. The only module here that knows both."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
NODE_VARIABLE = "SMFREE_NODE"
"""The address of a process that serves an emulated node (smfree.emulator.server); devices are its then."""
DEFAULT_PROFILE = "h100"
MAX_EMULATED = 16
"""GPUs of an emulated node: as many as one NVSwitch domain of a server had so far (DGX-2)."""

_ORDINALS = r"(?::(?P<ordinals>[0-9]+(?:,[0-9]+)*))?"
_GRAMMAR = re.compile(rf"(?:cuda|emu:(?P<profile>[a-z0-9_]+?)(?:x(?P<count>[0-9]+))?){_ORDINALS}")


class Kind(StrEnum):
    """What a device string asks for."""

    AUTO = "auto"
    CUDA = "cuda"
    EMULATED = "emu"


@dataclass(frozen=True)
class DeviceSpec:
    """A parsed device string: GPUs of one machine, real or emulated.

    ``auto``, ``cuda`` (all GPUs), ``cuda:0,2`` (these), ``emu:PROFILE``, ``emu:PROFILExN`` (all N of a node)
    or ``emu:PROFILExN:3`` (that one of the node). ``ordinals``: which of them; None: all there are.
    """

    kind: Kind
    ordinals: tuple[int, ...] | None = None
    profile: str = ""
    count: int = 1

    def __str__(self) -> str:
        if self.kind is Kind.AUTO:
            return "auto"
        name = "cuda" if self.kind is Kind.CUDA else f"emu:{self.profile}"
        if self.count > 1:
            name += f"x{self.count}"
        return name if self.ordinals is None else f"{name}:{','.join(map(str, self.ordinals))}"

    def of(self, ordinal: int) -> str:
        """The string that names one of these GPUs."""
        if self.kind is Kind.EMULATED and self.count == 1:
            return str(replace(self, ordinals=None))
        return str(replace(self, ordinals=(ordinal,)))


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
    known = profiles()
    found = _GRAMMAR.fullmatch(text)
    if found is None or (found["profile"] is not None and found["profile"] not in known):
        choices = ", ".join(["auto", "cuda", "cuda:N", *(f"emu:{name}" for name in known)])
        raise DeviceSpecError(
            f"unknown device {text!r}; known are {choices}; several GPUs: cuda:0,2 or emu:{DEFAULT_PROFILE}x8"
        )
    ordinals = tuple(map(int, found["ordinals"].split(","))) if found["ordinals"] else None
    if ordinals is not None and len(set(ordinals)) < len(ordinals):
        raise DeviceSpecError(f"each GPU is named once (got {text!r}); leave the second one out")
    if found["profile"] is None:
        return DeviceSpec(Kind.CUDA, ordinals)
    count = int(found["count"] or 1)
    if not 1 <= count <= MAX_EMULATED:
        raise DeviceSpecError(
            f"an emulated node has 1 to {MAX_EMULATED} GPUs (got {text!r}); use emu:{found['profile']}x8"
        )
    if ordinals is not None and max(ordinals) >= count:
        raise DeviceSpecError(f"{text!r}: a node of {count} has the GPUs 0 to {count - 1}; name one of them")
    return DeviceSpec(Kind.EMULATED, ordinals, profile=found["profile"], count=count)


def choose(
    text: str | None = None,
    *,
    ordinal: int = 0,
    schedule: str = "timed",
    seed: int = 0,
    strict: str = "error",
) -> Choice:
    """Pick and initialise a driver, and the GPU number ``ordinal`` of those that the string names.

    ``schedule`` and ``seed`` go to an emulated GPU only, ``strict`` to no other. With ``SMFREE_NODE`` set, an
    emulated GPU is one of the node that another process serves, with that node's settings.
    Raises DeviceSpecError for an unknown string or ordinal, NoDeviceError when ``cuda:N`` is not there.
    """
    choices = choose_all(text, schedule=schedule, seed=seed, strict=strict)
    if not isinstance(ordinal, Integral) or not 0 <= ordinal < len(choices):
        named = text if text is not None else os.environ.get(ENVIRONMENT_VARIABLE) or "auto"
        raise DeviceSpecError(
            f"{named!r} names {len(choices)} GPUs, so ordinal is 0 to {len(choices) - 1} (got {ordinal!r})"
        )
    return choices[ordinal]


def choose_all(
    text: str | None = None, *, schedule: str = "timed", seed: int = 0, strict: str = "error"
) -> list[Choice]:
    """Pick and initialise a driver: a choice for each GPU that the string names, all of the same driver.

    Raises as :func:`choose`.
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
        missing = [ordinal for ordinal in spec.ordinals or () if ordinal >= count]
        if missing:
            raise NoDeviceError(
                f"{spec.of(missing[0])} was asked for, but this machine has {count} GPUs: cuda:0 to "
                f"cuda:{count - 1}"
            )
        return _real(spec.ordinals or range(count), strict)
    if not reason:
        return _real(range(count), strict)
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
    if name == "CUDA_ERROR_NOT_INITIALIZED":
        return (
            f"this process was forked after CUDA was initialised (cuInit returned {name}): start processes "
            "with the method spawn (smfree.ranks.spawn)"
        ), 0
    if int(code) != 0:
        return f"the NVIDIA driver does not start (cuInit returned {name})", 0
    code, count = driver.cuDeviceGetCount()
    if int(code) != 0 or not count:
        return "this machine has no NVIDIA GPU", 0
    return "", int(count)


def _real(ordinals: Iterable[int], strict: str) -> list[Choice]:
    specs = [f"cuda:{ordinal}" for ordinal in ordinals]
    if strict != "error":
        raise DeviceSpecError(
            f"strict says what an emulated GPU does with its findings (got {strict!r} for {specs[0]}, a "
            f"real one, which finds nothing); leave it out, or open emu:{DEFAULT_PROFILE}"
        )
    return [Choice(real_driver, ordinal, spec, False) for ordinal, spec in zip(ordinals, specs, strict=True)]


def _emulated(spec: DeviceSpec, schedule: str, seed: int, strict: str) -> list[Choice]:
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
    driver: Any
    if address := os.environ.get(NODE_VARIABLE):
        driver = _attach(address, spec, {"schedule": schedule, "seed": seed, "strict": strict})
    else:
        gpus = [profile.load(spec.profile)] * spec.count
        driver = Driver(Node(gpus, schedule=schedule, seed=seed, strict=strict))
    ordinals = range(spec.count) if spec.ordinals is None else spec.ordinals
    return [Choice(driver, ordinal, spec.of(ordinal), True) for ordinal in ordinals]


def _attach(address: str, spec: DeviceSpec, asked: dict[str, Any]) -> Any:
    """This process's driver on a served node, which must be the one asked for; defaults take its settings."""
    from smfree.emulator.server import NodeLost, attach

    rank = os.environ.get("SMFREE_RANK") or os.environ.get("RANK")
    try:
        driver = attach(address, f"rank {rank}" if rank else "")
    except NodeLost as error:
        raise NoDeviceError(f"{NODE_VARIABLE} is set, but {error}; unset it for a node of its own") from None
    node = driver.node
    served = [device.profile.key for device in node.devices]
    if served != [spec.profile] * spec.count:
        raise DeviceSpecError(
            f"{spec} was asked for, but the node at {NODE_VARIABLE} has the GPUs {', '.join(served)}; name "
            f"them all, as emu:{served[0]}x{len(served)}"
        )
    for name, default in (("schedule", "timed"), ("seed", 0), ("strict", "error")):
        if asked[name] not in (default, getattr(node, name)):
            raise DeviceSpecError(
                f"{name}={asked[name]!r} was asked for, but the node at {NODE_VARIABLE} runs with "
                f"{str(getattr(node, name))!r}; start it so, or leave the argument out"
            )
    return driver
