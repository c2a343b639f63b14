"""CUDA C++ to a module image with NVRTC. Needs no GPU and no driver."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path

import numpy as np
from cuda.bindings import nvrtc

from smfree.cuda.cache import CompileCache
from smfree.cuda.capabilities import compute_capability_of
from smfree.cuda.errors import CompileError, ToolMissingError
from smfree.cuda.image import ModuleImage, make_image
from smfree.cuda.store import key_of

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
_NOT_FOUND = re.compile(
    r"""(?:cannot|could not) open source file "(?P<name>[^"]+)".*\s+#\s*include\s*(?P<quote>["<])"""
)
_OF_CUDA = re.compile(r"cuda|cub/|thrust/|nv/|cooperative_groups|mma\.h")
_NEEDS_ARCH_SUFFIX = ("wgmma", "setmaxnreg", "tcgen05", "cta_group", "multimem.cp")
_CVTA_PARAM = re.compile(r"cvta\.param\.u64\s+(?P<to>%rd\d+), (?P<from>%rd\d+);")
_BASE_OPTIONS = ("-lineinfo", "-default-device", "--std=c++17", "--ptxas-options=-v")


@dataclass(frozen=True)
class CudaSource:
    """One ``.cu`` file and how to compile it.

    ``defines`` become ``-DNAME=VALUE``; ``options`` are passed as they are. Headers are searched in
    ``include_dirs``, then in the file's own folder, then in the folder ``include`` of its nearest ancestor
    that has one. ``text`` replaces the file's content (``path`` then only names it).
    """

    path: Path
    defines: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()
    include_dirs: tuple[Path, ...] = ()
    text: str | None = field(default=None, repr=False)

    def __init__(
        self,
        path: Path | str,
        defines: Mapping[str, object] | None = None,
        options: tuple[str, ...] = (),
        *,
        include_dirs: tuple[Path | str, ...] = (),
        text: str | None = None,
    ) -> None:
        if text is not None and not isinstance(text, str):
            raise ValueError(f"text is a str (got {type(text).__name__}); decode it first")
        pairs = tuple(sorted((name, _define(name, value)) for name, value in (defines or {}).items()))
        for attribute, value in (
            ("path", Path(path)),
            ("defines", pairs),
            ("options", tuple(options)),
            ("include_dirs", tuple(Path(folder) for folder in include_dirs)),
            ("text", text),
        ):
            object.__setattr__(self, attribute, value)

    @property
    def name(self) -> str:
        """Folder and file, for example ``lsu/copy.cu``: the name in errors and records."""
        return "/".join(self.path.parts[-2:]).lstrip("/")

    @property
    def location(self) -> str:
        """The name that the compiler sees and that PTX's ``.file`` carries: the real path, for source
        views."""
        return str(self.path.resolve()) if self.text is None else self.name

    def read(self) -> bytes:
        """The source's bytes. Raises CompileError when the file is not there."""
        if self.text is not None:
            return self.text.encode()
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise CompileError(f"the CUDA source {self.path} cannot be read: {error.strerror}") from error

    def stamp(self) -> int:
        """Changes when the file itself does: its modification time in ns."""
        return 0 if self.text is not None or not self.path.exists() else self.path.stat().st_mtime_ns

    def search_dirs(self) -> tuple[Path, ...]:
        """Every directory that is searched for headers, in order."""
        dirs = list(self.include_dirs)
        here = self.path.resolve().parent
        if self.text is None or here.is_dir():
            dirs.append(here)
        for ancestor in (here, *here.parents):
            if (ancestor / "include").is_dir():
                dirs.append(ancestor / "include")
                break
        return tuple(dict.fromkeys(dirs))


def nvrtc_version() -> tuple[int, int]:
    """NVRTC's version, for example ``(13, 5)``. Raises ToolMissingError when the library is not installed."""
    major, minor = _call("nvrtcVersion")
    return int(major), int(minor)


def supported_archs() -> tuple[str, ...]:
    """The real architectures this NVRTC compiles for, for example ``("sm_75", "sm_80", ...)``."""
    (archs,) = _call("nvrtcGetSupportedArchs")
    return tuple(f"sm_{arch}" for arch in archs)


def compile_cuda(source: CudaSource, arch: str, *, cache: CompileCache | None = None) -> ModuleImage:
    """Compile for a real architecture (``sm_80``, ``sm_90a``, ...) into PTX and cubin, through the cache.

    Raises CompileError (with the log, the options and the searched directories), ToolMissingError without
    NVRTC.
    """
    compute_capability_of(arch)
    version = "NVRTC {}.{}".format(*nvrtc_version())
    text = source.read()
    dirs = source.search_dirs()
    options = compile_options(source, arch)
    parts: list[str | bytes] = ["cuda", version, arch, source.location, text, *options]
    parts += [part for found in _headers(text, dirs) for part in found]
    key = key_of(parts)
    return (cache or CompileCache()).fetch(key, lambda: _compile(source, text, arch, options, dirs, version))


def compile_options(source: CudaSource, arch: str) -> tuple[str, ...]:
    """The whole option list that NVRTC gets."""
    return (
        f"--gpu-architecture={arch}",
        *_BASE_OPTIONS,
        *(f"-I{folder}" for folder in source.search_dirs()),
        *(f"-D{name}={value}" for name, value in source.defines),
        *source.options,
    )


def _define(name: str, value: object) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(f"a define is a C identifier (got {name!r}); rename it")
    if isinstance(value, str):
        return value
    if isinstance(value, (Integral, np.bool_)):  # Python's and numpy's
        return str(int(value))
    raise ValueError(f"define {name} is an int, bool or str (got {value!r}); convert it first")


def _headers(text: bytes, dirs: tuple[Path, ...]) -> Iterator[tuple[str, bytes]]:
    """Every header reachable by name, conditional or not, with its content; missing ones by name alone."""
    queue = [(text, None)]
    seen: set[Path | str] = set()
    while queue:
        content, folder = queue.pop()
        for quote, raw in _INCLUDE.findall(content):
            name = raw.decode(errors="replace")
            places = ([folder] if quote == b'"' and folder else []) + list(dirs)
            path = next((place / name for place in places if (place / name).is_file()), None)
            if (path or name) in seen:
                continue
            seen.add(path or name)
            if path is None:
                yield f"missing {name}", b""
                continue
            body = path.read_bytes()
            yield str(path), body
            queue.append((body, path.parent))


def _compile(
    source: CudaSource, text: bytes, arch: str, options: tuple[str, ...], dirs: tuple[Path, ...], version: str
) -> ModuleImage:
    started = time.perf_counter()
    (program,) = _call("nvrtcCreateProgram", text, source.location.encode(), 0, [], [])
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _output(program, "nvrtcGetProgramLog").rstrip(b"\0 \n").decode(errors="replace")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(
                f"{version} cannot compile {source.name} for {arch} ({result.name})",
                log=log,
                options=options,
                include_dirs=[str(folder) for folder in dirs],
                hints=_hints(arch, text, log, dirs),
            )
        cubin = _output(program, "nvrtcGetCUBIN")
        ptx = _output(program, "nvrtcGetPTX").rstrip(b"\0 ").decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    if line := _converted_twice(ptx):
        raise CompileError(
            f"{version} made wrong code of {source.name} for {arch}: `{line}` converts the address of a "
            "parameter that has been converted before, so it points outside",
            options=options,
            hints=["NVRTC does so once a process has compiled with --device-debug: use a new process"],
        )
    return make_image(
        name=source.name,
        arch=arch,
        ptx=ptx,
        cubin=cubin,
        log=log,
        compiler=version,
        options=options,
        compile_seconds=time.perf_counter() - started,
    )


def _converted_twice(ptx: str) -> str | None:
    """The first ``cvta.param`` of a register that a ``cvta.param`` made; ptxas then adds the base of the
    parameters twice. NVRTC 13.5 emits it for sm_100 and later in a process that has compiled for one of them
    with ``--device-debug``."""
    generic = {match["to"] for match in _CVTA_PARAM.finditer(ptx)}
    return next((match[0] for match in _CVTA_PARAM.finditer(ptx) if match["from"] in generic), None)


def _output(program: object, name: str) -> bytes:
    (size,) = _call(f"{name}Size", program)
    buffer = bytearray(size)
    _call(name, program, buffer)
    return bytes(buffer)


def _hints(arch: str, text: bytes, log: str, dirs: tuple[Path, ...]) -> list[str]:
    hints = []
    if not arch.endswith(("a", "f")) and compute_capability_of(arch) >= (9, 0):
        words = [word for word in _NEEDS_ARCH_SUFFIX if word in log or word.encode() in text]
        if words:
            hints.append(
                f"{', '.join(words)} exists only on the arch-specific variant {arch}a: compile "
                f"for it, not {arch}"
            )
    if "invalid value for --gpu-architecture" in log:
        hints.append(f"this NVRTC knows {', '.join(supported_archs())}; install a newer nvidia-cuda-nvrtc")
    missing = _NOT_FOUND.search(log)
    if missing and missing["quote"] == '"' and not _OF_CUDA.match(missing["name"]):
        hints.append(
            f"{missing['name']} is looked for beside the file that includes it, then in include_dirs: copy "
            "it there, or pass its folder"
        )
    elif missing:
        hints.append(
            "NVRTC's wheel has no headers: CUDA's come with nvidia-cuda-runtime, <cuda/...> with "
            "nvidia-cuda-cccl; pass one root of one version as include_dirs"
        )
    for name in sorted({raw.decode(errors="replace") for _, raw in _INCLUDE.findall(text)}):
        found = [str(folder) for folder in dirs if (folder / name).is_file()]
        if len(found) > 1 and len({(Path(folder) / name).read_bytes() for folder in found}) > 1:
            hints.append(
                f"{name} differs between {' and '.join(found)}; the first was used: keep one include root"
            )
    return hints


def _call(name: str, *args: object) -> tuple:
    """Call NVRTC and check the return; a missing library becomes ToolMissingError."""
    try:
        result, *values = getattr(nvrtc, name)(*args)
    except RuntimeError as error:
        raise ToolMissingError(
            "NVRTC, CUDA's run-time compiler, cannot be loaded; install nvidia-cuda-nvrtc (CUDA 13) or "
            f"nvidia-cuda-nvrtc-cu12 (CUDA 12): {error}"
        ) from error
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{name} returned {result.name} ({int(result)})")
    return tuple(values)
