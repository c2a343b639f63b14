"""The syntax tree of a PTX module.

Everything is immutable. Names are already resolved: registers and labels of inner ``{ }`` scopes carry unique
names ("%q@1"), variables have their addresses inside their state space, parameters have their byte offsets.
Sizes, alignments and offsets are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the program that was compiled to PTX; ``inlined_at`` is the call site, innermost first.

    As text, the line in the kernel's own file comes first: "pingpong.cu:41 (inlined from ptx.cuh:127)". It
    is the innermost one where functions of that file were inlined into each other.
    """

    file: str
    line: int
    inlined_at: SourceLine | None = None
    function: str | None = None

    def __str__(self) -> str:
        chain = [self]
        while chain[-1].inlined_at is not None:
            chain.append(chain[-1].inlined_at)
        own = next(line for line in chain if line.file == chain[-1].file)
        here = f"{PurePath(self.file).name}:{self.line}"
        return here if own is self else f"{PurePath(own.file).name}:{own.line} (inlined from {here})"


# ------------------------------------------------------------------------------------------------ operands


@dataclass(frozen=True, slots=True)
class Reg:
    """A register, "%r1". One declared in an inner scope is made unique: "%q@1"."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """A constant. Integers are exact Python ints and ``bits`` is None.

    Floats keep their raw IEEE pattern in ``bits`` and its ``width``: 32 for 0fXXXXXXXX, 64 for 0dX... and
    decimals.
    """

    value: int | float
    bits: int | None = None
    width: int | None = None


@dataclass(frozen=True, slots=True)
class Special:
    """A special register: "%tid.x", "%clock64"."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, parameter or function, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class LabelRef:
    """A branch target; a key of the function's ``labels``."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """[base + offset]."""

    base: Reg | Symbol | Imm | None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Not:
    """A complemented predicate operand, "!%p1"."""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Sink:
    """ "_": the result is not wanted, or no register can hold it."""


@dataclass(frozen=True, slots=True)
class Vector:
    """{a, b, c, d}; also of one element."""

    elems: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class TensorAddress:
    """[map, {c0, c1, ...}]; ``extra`` holds further vectors (im2col offsets)."""

    map: Address
    coords: tuple[Operand, ...]
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """d|p, two results: setp p|q, shfl.sync d|p, elect.sync d|p."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class ArgList:
    """(a, b): arguments or results of a call."""

    elems: tuple[Operand, ...]


Operand = (
    Reg | Imm | Special | Symbol | LabelRef | Address | Not | Sink | Vector | TensorAddress | Pair | ArgList
)


# -------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class Guard:
    """@%p or @!%p."""

    reg: Reg
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Instr:
    """One instruction: "ld.global.v4.u32" has opcode "ld" and modifiers ("global", "v4", "u32").

    ``line`` is the PTX line (from 1) where it starts, ``source`` the line it was compiled from, ``text`` what
    was written, blanks squeezed.
    """

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None = None
    line: int = 0
    source: SourceLine | None = None
    text: str = ""

    @property
    def name(self) -> str:
        """The opcode with its modifiers, as written."""
        return ".".join((self.opcode, *self.modifiers))


# --------------------------------------------------------------------------------------------- declarations


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter at ``offset`` of the argument block; 8 bytes for a .u64, 128 for ``.b8 name[128]``."""

    name: str
    type: str
    align: int
    size_bytes: int
    offset: int
    is_pointer: bool = False
    pointer_space: str | None = None
    pointer_align: int = 1


@dataclass(frozen=True, slots=True)
class SharedVar:
    """A shared variable at ``offset`` of the CTA's window. ``size_bytes`` is None for ``extern name[]``.

    An extern one begins where static shared ends, rounded up to the largest alignment of the extern ones.
    """

    name: str
    align: int
    size_bytes: int | None
    offset: int


@dataclass(frozen=True, slots=True)
class LocalVar:
    """A .local variable (each thread has its own) at ``offset`` of the thread's local window."""

    name: str
    align: int
    size_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class GlobalVar:
    """A .global or .const variable. ``init`` is shorter than ``size_bytes`` when the rest is zero.

    ``relocations`` lists (offset, symbol): 8-byte words which hold the address of another symbol.
    """

    name: str
    space: str
    align: int
    size_bytes: int
    init: bytes = b""
    relocations: tuple[tuple[int, Symbol], ...] = ()
    is_extern: bool = False
    managed: bool = False


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel or device function with a body (a declaration has no instructions and ``is_declaration``).

    ``instrs`` is flat; ``labels`` map to an index into it (``len(instrs)`` for a label at the very end).
    ``registers`` maps every register, of inner scopes too, to its type: "pred", "b32", "f64"...
    """

    name: str
    params: tuple[Param, ...]
    registers: dict[str, str]
    instrs: tuple[Instr, ...]
    labels: dict[str, int]
    shared: dict[str, SharedVar] = field(default_factory=dict)
    static_shared_bytes: int = 0
    dynamic_align: int = 1
    local: dict[str, LocalVar] = field(default_factory=dict)
    local_bytes: int = 0
    call_params: dict[str, Param] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    target: str = ""
    version: str = ""

    @property
    def params_bytes(self) -> int:
        """Size of the argument block."""
        return max((p.offset + p.size_bytes for p in self.params), default=0)

    @property
    def dynamic_shared_offset(self) -> int:
        """Where dynamic shared memory begins in the CTA's window."""
        return -(-self.static_shared_bytes // self.dynamic_align) * self.dynamic_align


@dataclass(frozen=True, slots=True)
class Kernel(Function):
    """An .entry with its performance directives; None or empty where there is none."""

    reqntid: tuple[int, int, int] | None = None
    maxntid: tuple[int, int, int] | None = None
    minnctapersm: int | None = None
    maxnreg: int | None = None
    cluster_dims: tuple[int, int, int] | None = None
    maxclusterrank: int | None = None
    explicit_cluster: bool = False


@dataclass(frozen=True, slots=True)
class DeviceFunction(Function):
    """A .func. ``results`` are its return parameters."""

    results: tuple[Param, ...] = ()
    is_declaration: bool = False


@dataclass(frozen=True, slots=True)
class Module:
    """One PTX text. ``globals`` holds .global and .const variables, ``files`` the table of .file."""

    version: str
    target: str
    kernels: dict[str, Kernel]
    globals: dict[str, GlobalVar] = field(default_factory=dict)
    functions: dict[str, DeviceFunction] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
    target_options: tuple[str, ...] = ()
