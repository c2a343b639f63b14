"""A compiled module: PTX, cubin, and the facts about each entry point that both carry.

Registers and the local frame are read from the cubin's ``.nv.info`` section, static shared memory from its
``.nv.shared.NAME`` section, parameters and launch bounds from the PTX, and spills from the ptxas log where
the compiler leaves one (NVRTC does, Triton does not).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field, replace

from smfree.cuda.sass import SassFunction, disassemble

_SHT_SYMTAB = 2
_EIATTR_FRAME_SIZE = 0x11
_EIATTR_REGCOUNT = 0x2F
_PARAM_BITS = re.compile(r"^\.(?P<kind>[subf])(?P<bits>8|16|32|64)$")


@dataclass(frozen=True)
class ParamInfo:
    """One kernel parameter as PTX lays it out: ``kind`` is the type's letter (s, u, b, f), ``b`` for
    aggregates."""

    name: str
    kind: str
    size_bytes: int
    align: int
    offset: int
    is_pointer: bool = False


@dataclass(frozen=True)
class FunctionFacts:
    """What the compiler decided about one entry point.

    ``local_bytes`` is the frame in local memory per thread. ``spill_bytes`` counts spill stores plus loads
    as ptxas reports them; without a ptxas log it is the frame itself (exact when 0, an upper bound of the
    spilled data otherwise). ``required_block`` is ``.reqntid``, ``max_threads`` the product of ``.maxntid``
    or ``.reqntid``.
    """

    name: str
    params: tuple[ParamInfo, ...]
    registers: int = 0
    local_bytes: int = 0
    spill_bytes: int = 0
    static_shared_bytes: int = 0
    required_block: tuple[int, int, int] | None = None
    max_threads: int | None = None
    cluster_dims: tuple[int, int, int] | None = None

    @property
    def param_bytes(self) -> int:
        """Bytes of the packed parameter buffer."""
        return max((p.offset + p.size_bytes for p in self.params), default=0)


@dataclass(frozen=True)
class ModuleImage:
    """A compiled source. ``ptx`` goes to the emulated GPU, ``cubin`` to a real one; ``functions`` by entry
    name.

    ``compile_seconds`` is what the compiler took when it ran; ``from_cache`` tells that it did not run this
    time. ``metadata`` holds what a front end adds (Triton's launch metadata, as JSON-able values).
    """

    name: str
    arch: str
    ptx: str
    cubin: bytes
    log: str
    compiler: str
    options: tuple[str, ...]
    functions: dict[str, FunctionFacts]
    compile_seconds: float = 0.0
    from_cache: bool = field(default=False, compare=False)
    metadata: dict[str, object] = field(default_factory=dict)

    @property
    def ptx_version(self) -> str:
        """The ``.version`` line's number, for example ``9.5``."""
        found = re.search(r"^\.version\s+([\d.]+)", self.ptx, re.MULTILINE)
        return found.group(1) if found else "unknown"

    def sass(self, kernel: str | None = None) -> SassFunction:
        """Disassemble one kernel (the only one when ``kernel`` is None); see :mod:`smfree.cuda.sass`."""
        functions = disassemble(self.cubin, self.arch)
        if kernel is None and len(functions) == 1:
            return next(iter(functions.values()))
        if kernel is None or kernel not in functions:
            raise KeyError(f"{self.name} has SASS of {sorted(functions)}, asked for {kernel!r}; name one")
        return functions[kernel]

    def sass_counts(self, kernel: str | None = None) -> dict[str, int]:
        """Static SASS instruction counts by full opcode, for example ``{"LDG.E.128": 4, ...}``."""
        return self.sass(kernel).counts()


def make_image(
    *,
    name: str,
    arch: str,
    ptx: str,
    cubin: bytes,
    log: str,
    compiler: str,
    options: tuple[str, ...],
    compile_seconds: float = 0.0,
    metadata: dict[str, object] | None = None,
) -> ModuleImage:
    """Gather the facts of every entry point and build the image."""
    functions = entry_points(ptx)
    for fact in cubin_facts(cubin).values():
        if fact.name in functions:
            spills = spills_in_log(log, fact.name)
            functions[fact.name] = replace(
                functions[fact.name],
                registers=fact.registers,
                local_bytes=fact.frame_bytes,
                spill_bytes=fact.frame_bytes if spills is None else spills,
                static_shared_bytes=fact.static_shared_bytes,
            )
    return ModuleImage(
        name=name,
        arch=arch,
        ptx=ptx,
        cubin=cubin,
        log=log,
        compiler=compiler,
        options=options,
        functions=functions,
        compile_seconds=compile_seconds,
        metadata=dict(metadata or {}),
    )


# --- PTX ------------------------------------------------------------

_ENTRY = re.compile(r"\.entry\s+(?P<name>[\w$.]+)\s*(?:\((?P<params>[^)]*)\))?(?P<directives>[^{;]*)\{")
_TRIPLE = r"\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?"


def entry_points(ptx: str) -> dict[str, FunctionFacts]:
    """The entry points of a PTX text with their parameters, offsets and launch bounds."""
    ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    found = {}
    for match in _ENTRY.finditer(ptx):
        directives = match["directives"]
        required = _triple(directives, "reqntid")
        most = required or _triple(directives, "maxntid")
        found[match["name"]] = FunctionFacts(
            name=match["name"],
            params=_params(match["params"] or ""),
            required_block=required,
            max_threads=None if most is None else most[0] * most[1] * most[2],
            cluster_dims=_triple(directives, "reqnctapercluster"),
        )
    return found


def _triple(directives: str, word: str) -> tuple[int, int, int] | None:
    match = re.search(rf"\.{word}{_TRIPLE}", directives)
    if not match:
        return None
    x, y, z = (int(group or 1) for group in match.groups())
    return x, y, z


def _params(text: str) -> tuple[ParamInfo, ...]:
    params: list[ParamInfo] = []
    offset = 0
    for declaration in filter(None, (part.strip() for part in text.split(","))):
        words = declaration.split()
        bits = next((m for m in map(_PARAM_BITS.match, words) if m), None)
        array = re.search(r"([\w$.]+)\s*\[\s*(\d+)\s*\]\s*$", declaration)
        if bits is None:
            raise ValueError(f"a .param declaration without a type smfree knows: {declaration!r}")
        size = int(bits["bits"]) // 8
        align = size
        is_pointer = ".ptr" in words
        if ".align" in words and not is_pointer:  # after .ptr, .align describes the memory pointed to
            align = int(words[words.index(".align") + 1])
        if array:
            size *= int(array[2])
        offset = -(-offset // align) * align
        name = array[1] if array else words[-1]
        params.append(ParamInfo(name, "b" if array else bits["kind"], size, align, offset, is_pointer))
        offset += size
    return tuple(params)


# --- cubin ------------------------------------------------------------


@dataclass(frozen=True)
class CubinFacts:
    """Facts of one function in a cubin; sizes in bytes per thread (frame) and per CTA (static shared)."""

    name: str
    registers: int
    frame_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True)
class _Section:
    name: str
    type: int
    offset: int
    size: int
    link: int
    info: int


def cubin_facts(cubin: bytes) -> dict[str, CubinFacts]:
    """Registers, frame and static shared memory per function, from the ELF sections of a cubin."""
    sections = _sections(cubin)
    by_name = {section.name: section for section in sections}
    info = by_name.get(".nv.info")
    if info is None:
        raise ValueError("the cubin has no .nv.info section, so its registers are unknown")
    symbols = _symbols(cubin, sections)
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for attribute, payload in _attributes(cubin[info.offset : info.offset + info.size]):
        if attribute in (_EIATTR_REGCOUNT, _EIATTR_FRAME_SIZE) and len(payload) >= 8:
            symbol, value = struct.unpack_from("<II", payload)
            (registers if attribute == _EIATTR_REGCOUNT else frames)[symbols[symbol]] = value
    reserved = _reserved_shared(by_name)
    facts = {}
    for name in registers:
        shared = by_name.get(f".nv.shared.{name}")
        static = max(shared.size - reserved, 0) if shared else 0
        facts[name] = CubinFacts(name, registers[name], frames.get(name, 0), static)
    return facts


def machine_code(cubin: bytes) -> dict[str, bytes]:
    """The instructions of each function as ptxas encoded them; equal bytes are equal SASS."""
    prefix = ".text."
    return {
        section.name.removeprefix(prefix): cubin[section.offset : section.offset + section.size]
        for section in _sections(cubin)
        if section.name.startswith(prefix)
    }


def _reserved_shared(sections: dict[str, _Section]) -> int:
    """From sm_90 on ptxas counts the 1 KiB that the system reserves per CTA in each ``.nv.shared``
    section."""
    return 1024 if any(name.startswith(".nv.shared.reserved") for name in sections) else 0


def _sections(elf: bytes) -> list[_Section]:
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("a cubin is a 64-bit ELF file; these bytes are not")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    raw = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry_size) for i in range(count)]
    names = raw[names_index][4]
    return [_Section(_text(elf, names + r[0]), r[1], r[4], r[5], r[6], r[7]) for r in raw]


def _symbols(elf: bytes, sections: list[_Section]) -> list[str]:
    table = next(section for section in sections if section.type == _SHT_SYMTAB)
    names = sections[table.link].offset
    return [
        _text(elf, names + struct.unpack_from("<I", elf, position)[0])
        for position in range(table.offset, table.offset + table.size, 24)
    ]


def _text(elf: bytes, position: int) -> str:
    return elf[position : elf.index(b"\0", position)].decode()


def _attributes(info: bytes) -> list[tuple[int, bytes]]:
    """The (attribute, payload) records of an ``.nv.info`` section; format 4 carries a payload of its own
    size."""
    found, position = [], 0
    while position + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, position)
        position += 4
        if form == 4:
            found.append((attribute, info[position : position + value]))
            position += value
        else:
            found.append((attribute, struct.pack("<H", value)))
    return found


# --- ptxas log ------------------------------------------------------------


@dataclass(frozen=True)
class PtxasUsage:
    """One function's figures in a ``ptxas -v`` log; bytes."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int


def usage_in_log(log: str) -> dict[str, PtxasUsage]:
    """Parse the ``-v`` output of ptxas, function by function."""
    usage = {}
    for block in re.split(r"Compiling entry function\s+", log)[1:]:
        name = re.match(r"'([^']+)'", block)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill l", block)
        registers = re.search(r"Used (\d+) registers", block)
        shared = re.search(r"(\d+) bytes smem", block)
        if name and stack and registers:
            usage[name[1]] = PtxasUsage(
                int(registers[1]),
                int(stack[1]),
                int(stack[2]),
                int(stack[3]),
                int(shared[1]) if shared else 0,
            )
    return usage


def spills_in_log(log: str, name: str) -> int | None:
    """Spill stores plus spill loads of one function in bytes, None when the log does not say."""
    usage = usage_in_log(log).get(name)
    return None if usage is None else usage.spill_store_bytes + usage.spill_load_bytes
