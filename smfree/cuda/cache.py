"""Compiled modules on disk, shared by every process of this user.

An entry is one file: a magic line, the SHA-256 of the rest, then JSON. It is written beside its final place
and moved there atomically, so a reader sees a whole entry or none; an entry whose digest does not fit is
ignored and replaced by the next compilation. Keys are hashes over everything that decides the output.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from smfree.cuda.image import FunctionFacts, ModuleImage, ParamInfo

_MAGIC = b"smfree-module-3\n"


def default_cache_dir() -> Path:
    """``SMFREE_CACHE_DIR``, else ``smfree`` below ``XDG_CACHE_HOME``, else ``~/.cache/smfree``."""
    chosen = os.environ.get("SMFREE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "smfree"


def key_of(parts: Iterable[str | bytes]) -> str:
    """SHA-256 over the parts, each with its length, so that no two lists of parts collide by
    concatenation."""
    digest = hashlib.sha256(_MAGIC)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


class CompileCache:
    """Entries below ``root`` (default :func:`default_cache_dir`), safe when several processes fill it."""

    def __init__(self, root: Path | str | None = None) -> None:
        self.root = Path(root) if root is not None else default_cache_dir()

    def path(self, key: str) -> Path:
        """Where the entry of ``key`` lives."""
        return self.root / key[:2] / f"{key}.module"

    def get(self, key: str) -> ModuleImage | None:
        """The stored image, or None when there is none or it is damaged."""
        try:
            raw = self.path(key).read_bytes()
        except OSError:
            return None
        digest_end = len(_MAGIC) + 65
        if not raw.startswith(_MAGIC) or len(raw) < digest_end:
            return None
        payload = raw[digest_end:]
        if raw[len(_MAGIC) : digest_end - 1].decode(errors="replace") != hashlib.sha256(payload).hexdigest():
            return None
        try:
            return _decode(json.loads(payload))
        except (ValueError, TypeError, KeyError):  # another version of smfree wrote it
            return None

    def put(self, key: str, image: ModuleImage) -> None:
        """Store an image. A folder that cannot be written costs a warning, never the compilation."""
        payload = json.dumps(_encode(image)).encode()
        target = self.path(key)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{key[:8]}-")
        except OSError as error:
            self._warn(error)
            return
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
            os.replace(temporary, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            self._warn(error)

    def fetch(self, key: str, compile_it: Callable[[], ModuleImage]) -> ModuleImage:
        """The stored image, else what ``compile_it`` returns, stored."""
        image = self.get(key)
        if image is None:
            image = compile_it()
            self.put(key, image)
        return image

    def _warn(self, error: OSError) -> None:
        warnings.warn(
            f"the compile cache {self.root} cannot be written ({error}); "
            "set SMFREE_CACHE_DIR to a writable folder",
            RuntimeWarning,
            stacklevel=4,
        )


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
