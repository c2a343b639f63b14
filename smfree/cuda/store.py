"""Files of computed things, shared by every process of this user.

An entry is one file: a magic line, the SHA-256 of the rest, then the payload. It is written beside its
final place and moved there atomically, so a reader sees a whole entry or none; an entry whose digest does
not fit counts as absent. Keys are hashes over everything that decides the payload.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

_MAGIC = b"smfree-entry-4\n"
_DIGEST_END = len(_MAGIC) + 65


def default_cache_dir() -> Path:
    """``SMFREE_CACHE_DIR``, else ``smfree`` below ``XDG_CACHE_HOME``, else ``~/.cache/smfree``, else (a user
    without a home) ``smfree-UID`` in the temporary folder."""
    chosen = os.environ.get("SMFREE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "smfree"
    try:
        return Path.home() / ".cache" / "smfree"
    except RuntimeError:  # a user without a home, as in a container with a foreign user id
        return Path(tempfile.gettempdir()) / f"smfree-{os.getuid()}"


def key_of(parts: Iterable[str | bytes]) -> str:
    """SHA-256 over the parts, each with its length, so that no two lists of parts collide by
    concatenation."""
    digest = hashlib.sha256(_MAGIC)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


class FileStore:
    """Entries ``KEY.suffix`` below ``root`` (default :func:`default_cache_dir`); several processes may
    write."""

    def __init__(self, root: Path | str | None = None, *, suffix: str) -> None:
        self.root = Path(root) if root is not None else default_cache_dir()
        self.suffix = suffix

    def path(self, key: str) -> Path:
        """Where the entry of ``key`` lives."""
        return self.root / key[:2] / f"{key}.{self.suffix}"

    def read(self, key: str) -> bytes | None:
        """The payload, or None when there is no entry or it is damaged."""
        try:
            raw = self.path(key).read_bytes()
        except OSError:
            return None
        payload = raw[_DIGEST_END:]
        return payload if raw[:_DIGEST_END] == _head(payload) else None

    def write(self, key: str, payload: bytes) -> None:
        """Store a payload. A folder that cannot be written costs a warning, nothing else."""
        target = self.path(key)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{key[:8]}-")
        except OSError as error:
            self._warn(error)
            return
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_head(payload) + payload)
            os.replace(temporary, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        warnings.warn(
            f"the cache {self.root} cannot be written ({error}); set SMFREE_CACHE_DIR to a writable folder",
            RuntimeWarning,
            stacklevel=4,
        )


def _head(payload: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n"
