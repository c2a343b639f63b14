"""The stand-in has the shape of the real module, call by call."""

from __future__ import annotations

import inspect
import re

import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.driver import Driver, NotEmulated
from tests.emulator.driver_kit import open_driver

CALLS = sorted(name for name in dir(Driver) if name.startswith("cu"))


def real_parameters(name: str) -> list[str]:
    """Parameter names from the docstring's first line, which every version of the binding has."""
    inside = re.match(rf"{name}\((.*)\)$", getattr(cuda, name).__doc__.splitlines()[0])
    assert inside is not None
    bare = re.sub(r"\[[^\]]*\]", "", inside[1])
    return [
        part.split(":")[0].split("=")[0].split()[-1].lstrip("*") for part in bare.split(",") if part.strip()
    ]


def real_outputs(name: str) -> int:
    """How many values follow the CUresult, from the docstring's Returns section."""
    section = re.search(r"\n( *)Returns\n *-+\n(.*?)(?:\n *\n|\Z)", getattr(cuda, name).__doc__, re.DOTALL)
    assert section is not None
    entries = [
        line for line in section[2].splitlines() if re.match(rf"{section[1]}(\w+ : |CUresult)", line.rstrip())
    ]
    assert entries[0].strip() == "CUresult"
    return len(entries) - 1


@pytest.mark.parametrize("name", CALLS)
def test_call_has_the_real_parameters(name: str) -> None:
    assert list(inspect.signature(getattr(Driver, name)).parameters)[1:] == real_parameters(name)


@pytest.mark.parametrize("name", CALLS)
def test_call_returns_as_many_values_as_the_real_one(name: str) -> None:
    assert getattr(Driver, name).emulated_outputs == real_outputs(name)


def test_failure_returns_a_none_for_every_value() -> None:
    driver = open_driver()
    driver.cuCtxSetCurrent(None)
    code = cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT
    assert driver.cuCtxSynchronize() == (code,)
    assert driver.cuMemAlloc(16) == (code, None)
    assert driver.cuMemGetInfo() == (code, None, None)


def test_types_and_constants_are_the_real_ones() -> None:
    driver = open_driver()
    assert driver.CUresult is cuda.CUresult
    assert driver.CUlaunchConfig is cuda.CUlaunchConfig
    assert driver.cuuint64_t is cuda.cuuint64_t
    assert driver.CU_STREAM_LEGACY == cuda.CU_STREAM_LEGACY


def test_function_that_is_not_emulated_says_so_by_name() -> None:
    driver = open_driver()
    with pytest.raises(NotEmulated, match="cuGraphCreate is not emulated"):
        driver.cuGraphCreate(0)
    assert not hasattr(driver, "cuGraphCreate")


def test_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="cuNoSuchCall"):
        open_driver().cuNoSuchCall(1)
