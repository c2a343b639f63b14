"""Compiled modules on disk (see :mod:`smfree.cuda.store` for how entries are kept)."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from smfree.cuda.image import FunctionFacts, ModuleImage, ParamInfo
from smfree.cuda.store import FileStore


class CompileCache:
    """Module images below ``root`` (default: the user's cache), safe when several processes fill it."""

    def __init__(self, root: Path | str | None = None) -> None:
        self._store = FileStore(root, suffix="module")
        self.root = self._store.root

    def get(self, key: str) -> ModuleImage | None:
        """The stored image, or None when there is none or it is damaged."""
        payload = self._store.read(key)
        if payload is None:
            return None
        try:
            return _decode(json.loads(payload))
        except (ValueError, TypeError, KeyError):  # another version of smfree wrote it
            return None

    def put(self, key: str, image: ModuleImage) -> None:
        """Store an image."""
        self._store.write(key, json.dumps(_encode(image)).encode())

    def fetch(self, key: str, compile_it: Callable[[], ModuleImage]) -> ModuleImage:
        """The stored image, else what ``compile_it`` returns, stored."""
        image = self.get(key)
        if image is None:
            image = compile_it()
            self.put(key, image)
        return image


def _encode(image: ModuleImage) -> dict[str, object]:
    data = dataclasses.asdict(image)
    data["cubin"] = base64.b64encode(image.cubin).decode()
    del data["from_cache"]
    return data


def _decode(data: dict) -> ModuleImage:
    functions = {name: _facts(facts) for name, facts in data.pop("functions").items()}
    data["cubin"] = base64.b64decode(data["cubin"])
    data["options"] = tuple(data["options"])
    return ModuleImage(functions=functions, from_cache=True, **data)


def _facts(data: dict) -> FunctionFacts:
    data["params"] = tuple(ParamInfo(**param) for param in data["params"])
    for name in ("required_block", "cluster_dims"):
        data[name] = None if data[name] is None else tuple(data[name])
    return FunctionFacts(**data)
