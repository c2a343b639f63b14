"""A kernel with lines replaced: the same configuration, checked as ever, another source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest

from kernels.common import KERNELS
from kernels.reduce.config import ReduceConfig
from smfree.cuda import CudaSource, KernelFaultError


def mutated(config: Any, *replacements: tuple[str, str]) -> Any:
    """``config`` whose source has each text, which stands there once, replaced by another."""
    source = config.source
    text = source.read().decode()
    for old, new in replacements:
        assert text.count(old) == 1, f"{old!r} stands once in {source.name}"
        text = text.replace(old, new)

    class Mutated(type(config)):  # type: ignore[misc]
        @property
        def source(self) -> CudaSource:
            return CudaSource(source.path, dict(source.defines), text=text)

    return Mutated(**{field.name: getattr(config, field.name) for field in fields(config)})


def reported(*words: str) -> Any:
    """Expects a kernel fault whose report holds all ``words``."""
    return pytest.raises(KernelFaultError, match="".join(f"(?=[^\0]*{_escaped(word)})" for word in words))


def _escaped(word: str) -> str:
    return "".join(f"\\{c}" if c in "[](){}.*+?^$|\\" else c for c in word)


# --- reductions ---------------------------------------------------------------------------------------------

FILES = {"ring.sm": "ring.cu", "ring.tma": "ring_bulk.cu", "tree": "tree.cu", "oneshot": "oneshot.cu",
         "twoshot": "twoshot.cu", "direct": "twoshot.cu", "nvls": "nvls.cu"}  # fmt: skip
"""The kernel of each way."""


def flattened(text: str, seen: set[str]) -> str:
    """With the headers in it, each once."""

    def header(found: re.Match[str]) -> str:
        name = found[1]
        if name in seen:
            return ""
        seen.add(name)
        return flattened((KERNELS / "include" / name).read_text().replace("#pragma once", ""), seen)

    return re.sub(r'^#include "(\w+\.cuh)"$', header, text, flags=re.MULTILINE)


@contextmanager
def edited(way: str, *edits: tuple[str, str]) -> Iterator[None]:
    """Other texts in the kernel of a way of reducing, or in its headers; each stands there once."""
    right = ReduceConfig.source

    def wrong(config: ReduceConfig, *args: Any) -> CudaSource:
        source = right(config, *args)
        if config.file != FILES[way]:
            return source
        text = flattened(source.read().decode(), set())
        for old, new in edits:
            assert text.count(old) == 1, f"{old!r} stands once in {source.name}"
            text = text.replace(old, new)
        return CudaSource(source.path, dict(source.defines), text=text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReduceConfig, "source", wrong)
        yield
