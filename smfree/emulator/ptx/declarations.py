"""Declarations: types, parameters, variables with initialisers, and where they lie."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from smfree.emulator.errors import Unsupported
from smfree.emulator.ptx.ast import GlobalVar, Imm, Param, SharedVar, Symbol
from smfree.emulator.ptx.lexer import Cursor, literal

TYPE_BYTES: dict[str, int] = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8, "b128": 16,
}  # fmt: skip
LINKAGE = frozenset({".visible", ".extern", ".weak", ".common"})
VARIABLE_SPACES = frozenset({".global", ".const", ".shared", ".local"})

_SPECIAL_VECTORS = (
    "tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid",
)  # fmt: skip
_SPECIAL_SCALARS = (
    "laneid", "warpid", "nwarpid", "smid", "nsmid", "gridid", "is_explicit_cluster", "cluster_ctarank",
    "cluster_nctarank", "lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge", "lanemask_gt", "clock",
    "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi", "reserved_smem_offset_begin",
    "reserved_smem_offset_end", "reserved_smem_offset_cap", "reserved_smem_offset_0",
    "reserved_smem_offset_1",
    "total_smem_size", "aggr_smem_size", "dynamic_smem_size", "current_graph_exec",
)  # fmt: skip
SPECIAL_REGISTERS: frozenset[str] = frozenset(
    [f"%{v}{part}" for v in _SPECIAL_VECTORS for part in ("", ".x", ".y", ".z", ".w")]
    + [f"%{s}" for s in _SPECIAL_SCALARS]
    + [f"%pm{i}{suffix}" for i in range(8) for suffix in ("", "_64")]
    + [f"%envreg{i}" for i in range(32)]
)


def round_up(value: int, align: int) -> int:
    """``value`` rounded up to a multiple of ``align``."""
    return -(-value // align) * align


@dataclass(slots=True)
class Variable:
    """A variable as declared. ``size_bytes`` is None for an array without a size (extern shared memory)."""

    name: str
    space: str
    type: str
    align: int
    size_bytes: int | None
    init: bytes = b""
    relocations: tuple[tuple[int, Symbol], ...] = ()
    is_extern: bool = False
    managed: bool = False

    def to_global(self) -> GlobalVar:
        """As a module variable; one without a size has none until it is linked."""
        return GlobalVar(
            self.name,
            self.space,
            self.align,
            self.size_bytes or 0,
            self.init,
            self.relocations,
            self.is_extern,
            self.managed,
        )


def parse_type(cursor: Cursor) -> tuple[str, int]:
    """A type with an optional vector width: (".f32" -> ("f32", 1)), (".v4 .f32" -> ("f32", 4))."""
    lanes = 1
    text = cursor.next()
    if text in (".v2", ".v4", ".v8"):
        lanes = int(text[2:])
        text = cursor.next()
    if text in (".texref", ".samplerref", ".surfref"):
        raise Unsupported(
            f"PTX line {cursor.line}: textures and surfaces ({text}) are not modelled; use global memory",
            rule="ptx.texture",
        )
    name = text[1:]
    if name not in TYPE_BYTES and name != "pred":
        cursor.pos -= 1
        cursor.fail(f"'{text}' is no PTX type", rule="ptx.type")
    return name, lanes


def parse_align(cursor: Cursor) -> int | None:
    """An optional ``.align n``."""
    if not cursor.accept(".align"):
        return None
    align = cursor.integer("an alignment")
    if align <= 0 or align & (align - 1):
        cursor.fail(f".align needs a power of two, got {align}", rule="ptx.align")
    return align


def _dimensions(cursor: Cursor) -> list[int | None]:
    dims: list[int | None] = []
    while cursor.accept("["):
        dims.append(None if cursor.peek() == "]" else cursor.integer("an array size"))
        cursor.expect("]", "after an array size")
    return dims


def parse_param(cursor: Cursor, offset: int) -> Param:
    """One parameter, laid out at the first suitable place from ``offset``.

    ``.param .u64 .ptr .global .align 16 name``, ``.param .align 64 .b8 name[128]``.
    """
    line = cursor.line
    cursor.expect(".param", "before a parameter")
    align = parse_align(cursor)
    type_name, lanes = parse_type(cursor)
    if align is None:
        align = parse_align(cursor)
    is_pointer, pointer_space, pointer_align = False, None, 1
    if cursor.accept(".ptr"):
        is_pointer = True
        if cursor.peek() in (".global", ".const", ".shared", ".local"):
            pointer_space = cursor.next()[1:]
        pointer_align = parse_align(cursor) or 1
    name = cursor.next()
    unit = TYPE_BYTES[type_name] * lanes if type_name != "pred" else 0
    if not unit:
        cursor.fail(f"parameter {name} cannot be a predicate; pass a .u8", rule="ptx.type", line=line)
    size = unit
    for dim in _dimensions(cursor):
        if dim is None:
            cursor.fail(f"parameter {name} has an array without a size", rule="ptx.param", line=line)
        size *= dim
    align = align or unit
    return Param(
        name, type_name, align, size, round_up(offset, align), is_pointer, pointer_space, pointer_align
    )


def parameter_offsets(params: Iterable[Param], base: int = 0) -> list[int]:
    """Offsets in an argument block that begins at address ``base``: in order, each at its own alignment.

    ``Param.offset`` is this with base 0. A cubin's block begins where the constant bank says (0x160 on sm_80,
    0x210 on sm_90, 0x380 on sm_100), so a parameter aligned to more than 16 bytes can lie nearer to its
    predecessor there; only cuFuncGetParamInfo knows, which is why launches should pass pointers to values.
    """
    offsets: list[int] = []
    at = base
    for param in params:
        at = round_up(at, param.align)
        offsets.append(at - base)
        at += param.size_bytes
    return offsets


def parse_params(cursor: Cursor) -> tuple[Param, ...]:
    """A parenthesised list of parameters; the "(" is ahead."""
    params: list[Param] = []
    cursor.expect("(", "before a parameter list")
    offset = 0
    while not cursor.accept(")"):
        if params:
            cursor.expect(",", "between parameters")
        params.append(parse_param(cursor, offset))
        offset = params[-1].offset + params[-1].size_bytes
    return tuple(params)


def parse_variables(cursor: Cursor, linkage: frozenset[str]) -> list[Variable]:
    """A variable statement after its linkage words; the state space is ahead, the ';' is taken too."""
    space = cursor.next()[1:]
    managed = False
    align = parse_align(cursor)
    if cursor.accept(".attribute"):
        cursor.expect("(", "after .attribute")
        attributes = _balanced(cursor)
        managed = ".managed" in attributes
        if ".unified" in attributes:
            raise Unsupported(f"PTX line {cursor.line}: .unified is not modelled", rule="ptx.unified")
        align = parse_align(cursor) or align
    type_name, lanes = parse_type(cursor)
    if type_name == "pred":
        cursor.fail(f"a predicate cannot live in .{space}; declare it .reg", rule="ptx.type")
    if align is None:
        align = parse_align(cursor)
    unit = TYPE_BYTES[type_name] * lanes
    out: list[Variable] = []
    while True:
        name = cursor.next()
        if cursor.accept("<"):
            count = cursor.count("a count of variables")
            out += [Variable(f"{name}{i}", space, type_name, align or unit, unit) for i in range(count)]
        else:
            out.append(_one_variable(cursor, name, space, type_name, unit, align or unit))
            out[-1].managed = managed
            out[-1].is_extern = ".extern" in linkage
        if not cursor.accept(","):
            break
    cursor.expect(";", f"after the declaration of {name}")
    return out


def _one_variable(cursor: Cursor, name: str, space: str, type_name: str, unit: int, align: int) -> Variable:
    line = cursor.line
    dims = _dimensions(cursor)
    init = b""
    relocations: tuple[tuple[int, Symbol], ...] = ()
    if cursor.accept("="):
        if space not in ("global", "const"):
            cursor.fail(f"only .global and .const may be initialised, {name} is .{space}", rule="ptx.init")
        data, found = bytearray(), list[tuple[int, Symbol]]()
        inner = [d or 0 for d in dims[1:]]
        _initialiser(cursor, type_name, unit, inner, data, found)
        init, relocations = bytes(data), tuple(found)
        if dims and dims[0] is None:
            row = unit
            for dim in inner:
                row *= dim
            dims[0] = -(-len(init) // row)
    size: int | None = unit
    for extent in dims:
        size = None if extent is None or size is None else size * extent
    if size is not None and len(init) > size:
        cursor.fail(f"{name} holds {size} bytes, its initialiser has {len(init)}", rule="ptx.init", line=line)
    return Variable(name, space, type_name, align, size, init, relocations)


def _initialiser(
    cursor: Cursor,
    type_name: str,
    unit: int,
    inner: list[int],
    data: bytearray,
    relocations: list[tuple[int, Symbol]],
) -> None:
    """A value or a nested list; ``inner`` are the extents below; short lists are filled with zero."""
    if not cursor.accept("{"):
        _append_value(cursor, type_name, data, relocations)
        return
    row = unit
    for dim in inner:
        row *= dim
    while not cursor.accept("}"):
        start = len(data)
        nested = cursor.peek() == "{"
        _initialiser(cursor, type_name, unit, inner[1:], data, relocations)
        if nested:
            data.extend(bytes(max(0, start + row - len(data))))
        if cursor.peek() != "}":
            cursor.expect(",", "between initial values")


def _append_value(
    cursor: Cursor, type_name: str, data: bytearray, relocations: list[tuple[int, Symbol]]
) -> None:
    text, size = cursor.peek(), TYPE_BYTES[type_name]
    if literal(text) is not None or text in "-+~!(":
        value = cursor.constant("an initial value")
        if cursor.peek() == "(":
            raise Unsupported(
                f"PTX line {cursor.line}: mask() in initialisers is not modelled; store whole addresses",
                rule="ptx.init",
            )
        data.extend(encode(value, type_name))
        return
    cursor.pos += 1
    if text == "generic":
        cursor.expect("(", "after generic")
        text = cursor.next()
        cursor.expect(")", "after generic(name")
    offset = cursor.integer("an offset") if cursor.accept("+") else 0
    if size != 8:
        cursor.fail(f"the address of {text} needs 8 bytes, not a .{type_name}", rule="ptx.init")
    relocations.append((len(data), Symbol(text, offset)))
    data.extend(bytes(8))


def encode(value: Imm, type_name: str) -> bytes:
    """The bytes of a constant in a variable of this type."""
    size = TYPE_BYTES[type_name]
    if type_name in ("f32", "f64"):
        if isinstance(value.value, float) and value.width == size * 8 and value.bits is not None:
            return value.bits.to_bytes(size, "little")
        return struct.pack("<f" if size == 4 else "<d", value.value)
    if isinstance(value.value, float):
        if value.bits is None or value.width != size * 8:
            raise Unsupported(f"a float as initial value of a .{type_name} is not modelled", rule="ptx.init")
        return value.bits.to_bytes(size, "little")
    return (value.value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")


def _balanced(cursor: Cursor) -> list[str]:
    out, depth = [], 1
    while depth:
        text = cursor.next()
        depth += (text == "(") - (text == ")")
        out.append(text)
    return out


def lay_out_shared(variables: Iterable[Variable]) -> tuple[dict[str, SharedVar], int, int]:
    """Static shared memory in declaration order from 0, then the extern arrays, all at one place.

    Returns the variables, the static bytes and the alignment of the dynamic part.
    """
    every = list(variables)
    placed: dict[str, SharedVar] = {}
    end, dynamic_align = 0, 1
    for v in every:
        if v.size_bytes is None:
            dynamic_align = max(dynamic_align, v.align)
            continue
        offset = round_up(end, v.align)
        placed[v.name] = SharedVar(v.name, v.align, v.size_bytes, offset)
        end = offset + v.size_bytes
    for v in every:
        if v.size_bytes is None:
            placed[v.name] = SharedVar(v.name, v.align, None, round_up(end, dynamic_align))
    return placed, end, dynamic_align
