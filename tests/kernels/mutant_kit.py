"""A kernel with lines replaced: the same configuration, checked as ever, another source."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

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
