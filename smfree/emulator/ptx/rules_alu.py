"""Rules for arithmetic: how many operands, of which type and width.

A signature has one letter per operand, destination first: t the instruction's type, w twice as wide (.wide),
u a 32-bit count, p a predicate.
"""

from __future__ import annotations

from collections.abc import Iterator

from smfree.emulator.ptx.ast import Imm, Operand, Pair, Reg, Special
from smfree.emulator.ptx.declarations import TYPE_BYTES
from smfree.emulator.ptx.rules import Finding, Site, table

_ARITHMETIC = "usf"
_BITS = "bp"
_ANY = "usfbp"
_SIGNATURES: dict[str, tuple[str, str]] = {
    "add": ("ttt", _ARITHMETIC),
    "sub": ("ttt", _ARITHMETIC),
    "mul": ("ttt", _ARITHMETIC),
    "min": ("ttt", _ARITHMETIC),
    "max": ("ttt", _ARITHMETIC),
    "rem": ("ttt", "us"),
    "and": ("ttt", _BITS),
    "or": ("ttt", _BITS),
    "xor": ("ttt", _BITS),
    "not": ("tt", _BITS),
    "neg": ("tt", "sf"),
    "mov": ("tt", _ANY),
    "mad": ("tttt", _ARITHMETIC),
    "fma": ("tttt", "f"),
    "shl": ("ttu", "b"),
    "shr": ("ttu", "usb"),
    "selp": ("tttp", "usfb"),
    "setp": ("ptt", "usfb"),
    "bfe": ("ttuu", "us"),
    "bfi": ("tttuu", "b"),
    "bfind": ("ut", "us"),
    "popc": ("ut", "b"),
    "clz": ("ut", "b"),
    "brev": ("tt", "b"),
    "mapa": ("ttu", "u"),
    "getctarank": ("ut", "u"),
}
_WORDS = frozenset({"bfe", "bfi", "bfind", "popc", "clz", "brev", "mapa", "getctarank"})  # of 32 or 64 bits
_WIDE = {"mul": "wtt", "mad": "wttw"}
_SPECIAL_SOURCES = frozenset({"mov"})
_ORDERED = frozenset({"lt", "le", "gt", "ge"})
_UNSIGNED = frozenset({"lo", "ls", "hi", "hs"})
_FLOAT_ONLY = frozenset({"equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"})


def _kind(type_name: str) -> str:
    """u, s, f, b or p; packed and brain floats are checked by width only."""
    return "f" if type_name.startswith("bf") else type_name[0]


def _alu(site: Site) -> Iterator[Finding]:
    opcode, name = site.instr.opcode, site.instr.name
    type_name = site.modifiers[-1] if site.modifiers else ""
    signature, kinds = _SIGNATURES[opcode]
    if type_name == "f32x2" and site.target.number < 100:
        yield Finding("ptx.target", f"{name} needs sm_100, the target is {site.target}")
    if type_name[-2:] in ("x2", "x4") or sum(m in TYPE_BYTES for m in site.modifiers) > 1:
        return  # packed and mixed-precision forms have shapes of their own
    small = opcode in _WORDS and TYPE_BYTES.get(type_name, 0) < 4
    if (type_name not in TYPE_BYTES and type_name != "pred") or _kind(type_name) not in kinds or small:
        example = {"b": "b32", "u": "u32", "s": "s32", "f": "f32"}[kinds[0]]
        yield Finding(
            "alu.type", f"{name}: .{type_name or '?'} is no type of {opcode}; use one such as .{example}"
        )
        return
    if opcode in _WIDE and _kind(type_name) in "us":
        if not (site.has("lo") or site.has("hi") or site.has("wide")):
            yield Finding("alu.type", f"{name} needs .lo, .hi or .wide; write {opcode}.lo.{type_name}")
            return
        if site.has("wide"):
            signature = _WIDE[opcode]
    if opcode in ("min", "max") and len(site.operands) == 4 and type_name == "f32":
        if site.target.number < 100:
            yield Finding("ptx.target", f"{name} of three values needs sm_100, the target is {site.target}")
        signature = "tttt"
    if opcode == "setp":
        yield from _comparison(site, _kind(type_name), type_name)
        if any(m in ("and", "or", "xor") for m in site.modifiers):
            signature += "p"
    if len(site.operands) != len(signature):
        yield Finding("alu.operands", f"{name} takes {len(signature)} operands, got {len(site.operands)}")
        return
    for index, (letter, operand) in enumerate(zip(signature, site.operands, strict=True)):
        if index == 0 and isinstance(operand, Imm | Special):
            yield Finding("alu.operands", f"{name} needs a register as destination; got '{site.instr.text}'")
        elif isinstance(operand, Special) and opcode not in _SPECIAL_SOURCES:
            yield Finding("alu.operands", f"{name} cannot read {operand.name}; mov it to a register first")
        else:
            yield from _fits(site, letter, operand, type_name)


def _comparison(site: Site, kind: str, type_name: str) -> Iterator[Finding]:
    how = site.modifiers[0]
    wrong = (how in _UNSIGNED and kind != "u") or (how in _FLOAT_ONLY and kind != "f")
    if wrong or (how in _ORDERED and kind == "b"):
        yield Finding("alu.comparison", f"{site.instr.name}: .{how} does not compare .{type_name}")


def _fits(site: Site, letter: str, operand: Operand, type_name: str) -> Iterator[Finding]:
    name = site.instr.name
    for part in (operand.first, operand.second) if isinstance(operand, Pair) else (operand,):
        wanted = {"p": "pred", "u": "u32"}.get(letter, type_name)
        if isinstance(part, Imm):
            if not _immediate_fits(part, wanted):
                yield Finding("alu.immediate", f"{name}: the constant {part.value} does not fit .{wanted}")
            continue
        declared = site.register_type(part)
        if not isinstance(part, Reg) or declared is None:
            continue
        size = TYPE_BYTES.get(wanted, 0) * (2 if letter == "w" else 1)
        if TYPE_BYTES.get(declared, 0) != size:
            yield Finding(
                "alu.register",
                f"{name}: {part.name} is .{declared}, this operand has {size * 8 or 1} bits; use another "
                "register or cvt",
            )
        elif letter == "t" and not _kinds_agree(_kind(wanted), _kind(declared)):
            yield Finding(
                "alu.register", f"{name}: {part.name} is .{declared}, not .{wanted}; mov.b32 it first"
            )


def _immediate_fits(value: Imm, wanted: str) -> bool:
    kind = _kind(wanted)
    if kind == "f":
        return isinstance(value.value, float)
    if isinstance(value.value, float):
        return kind == "b" and value.width == 8 * TYPE_BYTES[wanted]
    return True


def _kinds_agree(wanted: str, declared: str) -> bool:
    if "b" in (wanted, declared) or wanted == declared:
        return True
    return wanted in "us" and declared in "us"


def _funnel_shift(site: Site) -> Iterator[Finding]:
    if not site.has("wrap") and not site.has("clamp"):
        yield Finding(
            "alu.shf", f"{site.instr.name} does not say what a count above 31 does; add .wrap or .clamp"
        )


RULES = table((" ".join(_SIGNATURES), _alu), ("shf", _funnel_shift))
