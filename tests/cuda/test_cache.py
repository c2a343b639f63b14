"""The compile cache: keys, damage, several processes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from smfree.cuda import CompileCache, CudaSource, compile_cuda
from smfree.cuda.store import default_cache_dir, key_of
from tests.cuda.sources import ABI, COPY, source


def _entries(cache: CompileCache) -> list[Path]:
    return sorted(cache.root.rglob("*.module"))


def test_second_compilation_comes_from_the_cache_unchanged(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    first = compile_cuda(source(ABI), "sm_90a", cache=cache)
    second = compile_cuda(source(ABI), "sm_90a", cache=cache)
    assert not first.from_cache and second.from_cache
    assert first == second and first.compile_seconds > 0
    assert len(_entries(cache)) == 1


def test_every_part_of_the_key_makes_another_entry(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    for variant, arch in (
        (source(COPY), "sm_90a"),
        (source(COPY), "sm_80"),
        (source(COPY + "\n"), "sm_90a"),
        (source(COPY, N=1), "sm_90a"),
        (source(COPY, N=2), "sm_90a"),
        (CudaSource("test/kernel.cu", options=("--maxrregcount=32",), text=COPY), "sm_90a"),
        (CudaSource("test/other.cu", text=COPY), "sm_90a"),
    ):
        assert not compile_cuda(variant, arch, cache=cache).from_cache
    assert len(_entries(cache)) == 7


def test_compiler_version_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CompileCache(tmp_path)
    compile_cuda(source(COPY), "sm_90a", cache=cache)
    monkeypatch.setattr(sys.modules["smfree.cuda.compile_cuda"], "nvrtc_version", lambda: (99, 0))
    assert not compile_cuda(source(COPY), "sm_90a", cache=cache).from_cache


def test_changed_header_recompiles_even_when_included_indirectly(tmp_path: Path) -> None:
    folder = tmp_path / "k"
    folder.mkdir()
    (folder / "inner.cuh").write_text("#define VALUE 11\n")
    (folder / "outer.cuh").write_text('#include "inner.cuh"\n')
    file = folder / "f.cu"
    file.write_text('# include "outer.cuh"\nextern "C" __global__ void f(int* p) { *p = VALUE; }')
    cache = CompileCache(tmp_path / "cache")
    compile_cuda(CudaSource(file), "sm_90a", cache=cache)
    assert compile_cuda(CudaSource(file), "sm_90a", cache=cache).from_cache
    (folder / "inner.cuh").write_text("#define VALUE 77\n")
    changed = compile_cuda(CudaSource(file), "sm_90a", cache=cache)
    assert not changed.from_cache and "77" in changed.ptx


def test_header_that_appears_earlier_in_the_path_recompiles(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (second / "h.cuh").write_text("#define VALUE 11\n")
    text = '#include "h.cuh"\nextern "C" __global__ void f(int* p) { *p = VALUE; }'
    made = CudaSource("t/x.cu", text=text, include_dirs=(first, second))
    cache = CompileCache(tmp_path / "cache")
    compile_cuda(made, "sm_90a", cache=cache)
    (first / "h.cuh").write_text("#define VALUE 77\n")
    assert "77" in compile_cuda(made, "sm_90a", cache=cache).ptx


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "other magic", "binary"])
def test_damaged_entry_is_never_trusted(tmp_path: Path, damage: str) -> None:
    cache = CompileCache(tmp_path)
    good = compile_cuda(source(COPY), "sm_90a", cache=cache)
    (entry,) = _entries(cache)
    raw = bytearray(entry.read_bytes())
    if damage == "truncate":
        raw = raw[: len(raw) // 2]
    elif damage == "flip":
        raw[len(raw) // 2] ^= 1
    elif damage == "empty":
        raw = bytearray()
    elif damage == "other magic":
        raw[0] ^= 1
    else:
        raw = bytearray(os.urandom(4096))
    entry.write_bytes(raw)
    again = compile_cuda(source(COPY), "sm_90a", cache=cache)
    assert not again.from_cache and again.cubin == good.cubin
    assert compile_cuda(source(COPY), "sm_90a", cache=cache).from_cache


def test_entry_with_a_right_digest_but_other_fields_is_recompiled(tmp_path: Path) -> None:
    """Written by another version of smfree: the digest fits, the fields do not."""
    cache = CompileCache(tmp_path)
    image = compile_cuda(source(COPY), "sm_90a", cache=cache)
    (entry,) = _entries(cache)
    key = entry.stem
    payload = json.dumps({"name": "x", "functions": {}, "cubin": "", "options": []}).encode()
    head = entry.read_bytes().split(b"\n", 1)[0] + b"\n"
    entry.write_bytes(head + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
    assert cache.get(key) is None
    assert not compile_cuda(source(COPY), "sm_90a", cache=cache).from_cache
    stored = cache.get(key)
    assert stored is not None and (stored.ptx, stored.functions) == (image.ptx, image.functions)


def _fill(root: str, start: object, results: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    cache = CompileCache(root)
    images = [compile_cuda(source(COPY, N=n), "sm_90a", cache=cache) for n in range(3)]
    results.put([image.cubin for image in images])  # type: ignore[attr-defined]


def test_four_processes_fill_one_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=_fill, args=(str(tmp_path), start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    cubins = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    cache = CompileCache(tmp_path)
    assert len(_entries(cache)) == 3
    assert [p for p in tmp_path.rglob("*") if p.is_file()] != [] and not list(tmp_path.rglob(".*-*"))
    for n in range(3):
        image = compile_cuda(source(COPY, N=n), "sm_90a", cache=cache)
        assert image.from_cache and image.cubin in [c[n] for c in cubins]


def test_folder_that_cannot_be_written_warns_and_compiles(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    with pytest.warns(RuntimeWarning, match="cannot be written.*SMFREE_CACHE_DIR"):
        image = compile_cuda(source(COPY), "sm_90a", cache=CompileCache(blocked))
    assert image.cubin


def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMFREE_CACHE_DIR", "/a/b")
    assert default_cache_dir() == Path("/a/b")
    monkeypatch.delenv("SMFREE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_dir() == Path("/x/smfree")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "smfree"


def test_key_parts_do_not_run_together() -> None:
    assert key_of(["ab", "c"]) != key_of(["a", "bc"]) and key_of(["a", b"b"]) == key_of([b"a", "b"])


def test_a_user_without_a_home_caches_in_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SMFREE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert default_cache_dir().name.startswith("smfree-")
