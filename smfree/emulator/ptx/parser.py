"""PTX text to a :class:`~smfree.emulator.ptx.ast.Module`.

Parsing is generic over opcodes: any ``opcode.modifiers operands;`` passes, whether an instruction is known is
for the rules (check) and the executor. Any ``.version`` is accepted. What is malformed, and directives nobody
knows, raise :class:`~smfree.emulator.errors.PtxError` with the PTX line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from smfree.emulator.errors import Unsupported
from smfree.emulator.ptx.ast import (
    Address,
    ArgList,
    DeviceFunction,
    Function,
    GlobalVar,
    Instr,
    Kernel,
    Module,
    Operand,
    Pair,
    Param,
    Reg,
    Symbol,
    TensorAddress,
    Vector,
)
from smfree.emulator.ptx.body import Body, DebugInfo
from smfree.emulator.ptx.declarations import (
    LINKAGE,
    VARIABLE_SPACES,
    Variable,
    lay_out_shared,
    parse_params,
    parse_variables,
    round_up,
)
from smfree.emulator.ptx.lexer import Cursor, literal

_DIM3 = frozenset({".maxntid", ".reqntid", ".reqnctapercluster"})
_COUNT = frozenset({".minnctapersm", ".maxnctapersm", ".maxnreg", ".maxclusterrank"})
_FLAG = frozenset({".noreturn", ".explicitcluster", ".blocksareclusters"})
_IGNORED_COUNT = frozenset({".abi_preserve", ".abi_preserve_control"})


@dataclass(slots=True)
class _Head:
    """A function's signature; ``body_at`` is the token of its '{', None for a declaration."""

    name: str
    is_kernel: bool
    params: tuple[Param, ...]
    results: tuple[Param, ...]
    directives: dict[str, tuple[int, ...]]
    line: int
    body_at: int | None = None


@dataclass(slots=True)
class _Parser:
    cursor: Cursor
    version: str = ""
    target: str = ""
    options: tuple[str, ...] = ()
    heads: dict[str, _Head] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
    strings: bytearray = field(default_factory=bytearray)
    string_labels: dict[str, int] = field(default_factory=dict)

    # --------------------------------------------------------------------------------- module directives

    def outline(self) -> None:
        """Everything but the bodies: directives, variables, signatures."""
        cursor = self.cursor
        while text := cursor.peek():
            if text in (".version", ".target", ".address_size"):
                self._header(cursor.next())
            elif text == ".file":
                self._file()
            elif text == ".section":
                self._section()
            elif text == ".pragma":
                while cursor.next() != ";":
                    pass
            elif text == ".alias":
                raise Unsupported(f"PTX line {cursor.line}: .alias is not modelled", rule="ptx.alias")
            elif text in LINKAGE or text in VARIABLE_SPACES or text in (".entry", ".func"):
                self._declaration()
            else:
                cursor.fail(f"'{text}' is not known at module level", rule="ptx.directive")

    def _header(self, directive: str) -> None:
        cursor = self.cursor
        value = cursor.next()
        if directive == ".version":
            self.version = value
        elif directive == ".target":
            self.target = value
            options: list[str] = []
            while cursor.accept(","):
                options.append(cursor.next())
            self.options = tuple(options)
        elif value != "64":
            cursor.fail(
                f".address_size {value} is not modelled; compile for 64 bits", rule="ptx.address_size"
            )

    def _file(self) -> None:
        cursor = self.cursor
        cursor.pos += 1
        index = cursor.integer("a file's index")
        name = cursor.next()
        if not name.startswith('"'):
            cursor.fail(f".file needs a name in quotes, got {name}")
        self.files[index] = name[1:-1]
        while cursor.accept(","):
            cursor.next()

    def _section(self) -> None:
        """Debug sections are skipped, but for the strings which .loc refers to."""
        cursor = self.cursor
        cursor.pos += 1
        if cursor.next() != ".debug_str":
            cursor.skip_braces()
            return
        self.string_labels[".debug_str"] = len(self.strings)
        cursor.expect("{", "before the bytes of a section")
        while not cursor.accept("}"):
            text = cursor.next()
            if cursor.accept(":"):
                self.string_labels[text] = len(self.strings)
            elif (value := literal(text)) is not None and isinstance(value.value, int):
                self.strings.append(value.value & 0xFF)

    def _declaration(self) -> None:
        cursor = self.cursor
        linkage: set[str] = set()
        while cursor.peek() in LINKAGE:
            linkage.add(cursor.next())
        if cursor.peek() in (".entry", ".func"):
            self._head()
            return
        if cursor.peek() not in VARIABLE_SPACES:
            cursor.fail(f"'{cursor.peek()}' cannot be declared at module level", rule="ptx.directive")
        for variable in parse_variables(cursor, frozenset(linkage)):
            if variable.space == "local":
                cursor.fail(f".local variable {variable.name} must be inside a function", rule="ptx.local")
            old = self.variables.get(variable.name)
            if old is not None and not old.is_extern:
                if variable.is_extern:
                    continue
                cursor.fail(f"'{variable.name}' is declared twice; rename one", rule="ptx.duplicate")
            self.variables[variable.name] = variable

    def _head(self) -> None:
        cursor = self.cursor
        is_kernel = cursor.next() == ".entry"
        if cursor.accept(".attribute"):
            raise Unsupported(f"PTX line {cursor.line}: .attribute is not modelled", rule="ptx.attribute")
        results = parse_params(cursor) if cursor.peek() == "(" else ()
        line = cursor.line
        head = _Head(cursor.next(), is_kernel, (), results, {}, line)
        if cursor.peek() == "(":
            head.params = parse_params(cursor)
        self._performance_directives(head.directives)
        if cursor.peek() == "{":
            head.body_at = cursor.pos
            cursor.skip_braces()
        else:
            cursor.expect(";", f"after the declaration of {head.name}")
        old = self.heads.get(head.name)
        if old is not None and old.body_at is not None:
            if head.body_at is None:
                return
            cursor.fail(f"'{head.name}' is defined twice; rename one", rule="ptx.duplicate", line=line)
        self.heads[head.name] = head

    def _performance_directives(self, found: dict[str, tuple[int, ...]]) -> None:
        cursor = self.cursor
        while cursor.peek()[:1] == ".":
            name = cursor.next()
            if name in _DIM3:
                sizes = [cursor.integer(f"a size of {name}")]
                while cursor.accept(","):
                    sizes.append(cursor.integer(f"a size of {name}"))
                found[name] = tuple((*sizes, 1, 1)[:3])
            elif name in _COUNT or name in _IGNORED_COUNT:
                found[name] = (cursor.integer(f"the value of {name}"),)
            elif name in _FLAG:
                found[name] = (1,)
            elif name == ".pragma":
                while cursor.next() != ";":
                    pass
            else:
                cursor.fail(f"directive '{name}' is not known before a body", rule="ptx.directive")

    # -------------------------------------------------------------------------------------------- bodies

    def module(self) -> Module:
        """Parse the bodies and put the module together."""
        names: dict[str, Operand] = {n: Symbol(n) for n in (*self.heads, *self.variables)}
        debug = DebugInfo(self.files, bytes(self.strings), self.string_labels)
        bodies: dict[str, Body] = {}
        for head in self.heads.values():
            if head.body_at is not None:
                scope = names | {p.name: Symbol(p.name) for p in (*head.params, *head.results)}
                self.cursor.pos = head.body_at
                bodies[head.name] = Body(self.cursor, scope, debug).parse()
        uses = {name: _symbols(body.instrs) for name, body in bodies.items()}
        kernels: dict[str, Kernel] = {}
        functions: dict[str, DeviceFunction] = {}
        for head in self.heads.values():
            function = self._function(head, bodies.get(head.name), _reachable(head.name, uses))
            if isinstance(function, Kernel):
                kernels[head.name] = function
            elif isinstance(function, DeviceFunction):
                functions[head.name] = function
        return Module(
            self.version, self.target, kernels, self._globals(bodies), functions, self.files, self.options
        )

    def _globals(self, bodies: Mapping[str, Body]) -> dict[str, GlobalVar]:
        every = [v for v in self.variables.values() if v.space != "shared"]
        every += [v for body in bodies.values() for v in body.globals]
        return {v.name: v.to_global() for v in every}

    def _function(self, head: _Head, body: Body | None, used: frozenset[str]) -> Function | None:
        if body is None:
            if head.is_kernel:
                return None
            return DeviceFunction(
                head.name, head.params, {}, (), {}, target=self.target, version=self.version,
                results=head.results, is_declaration=True,
            )  # fmt: skip
        variables = [v for v in self.variables.values() if v.space == "shared" and v.name in used]
        shared, static_bytes, dynamic_align = lay_out_shared([*variables, *body.shared])
        common = Function(
            head.name, head.params, body.registers, tuple(body.instrs), body.labels, shared, static_bytes,
            dynamic_align, body.local, round_up(body.local_bytes, 16), body.call_params, body.branch_targets,
            self.target, self.version,
        )  # fmt: skip
        fields = {name: getattr(common, name) for name in Function.__slots__}
        if not head.is_kernel:
            return DeviceFunction(**fields, results=head.results)
        d = head.directives
        if ".blocksareclusters" in d:
            raise Unsupported(
                f"kernel {head.name}: .blocksareclusters is not modelled; launch with the number of CTAs",
                rule="ptx.blocksareclusters",
            )
        return Kernel(
            **fields,
            reqntid=_dim3(d.get(".reqntid")),
            maxntid=_dim3(d.get(".maxntid")),
            minnctapersm=_count(d.get(".minnctapersm")),
            maxnreg=_count(d.get(".maxnreg")),
            cluster_dims=_dim3(d.get(".reqnctapercluster")),
            maxclusterrank=_count(d.get(".maxclusterrank")),
            explicit_cluster=".explicitcluster" in d,
        )


def _dim3(values: tuple[int, ...] | None) -> tuple[int, int, int] | None:
    return (values[0], values[1], values[2]) if values else None


def _count(values: tuple[int, ...] | None) -> int | None:
    return values[0] if values else None


def _symbols(instrs: Iterable[Instr]) -> frozenset[str]:
    found: set[str] = set()
    for instr in instrs:
        for operand in instr.operands:
            if not isinstance(operand, Reg):
                _collect(operand, found)
    return frozenset(found)


def _collect(operand: Operand | None, found: set[str]) -> None:
    if isinstance(operand, Symbol):
        found.add(operand.name)
    elif isinstance(operand, Address):
        if isinstance(operand.base, Symbol):
            found.add(operand.base.name)
    elif isinstance(operand, Vector | ArgList):
        for elem in operand.elems:
            _collect(elem, found)
    elif isinstance(operand, TensorAddress):
        for part in (operand.map, *operand.coords, *operand.extra):
            _collect(part, found)
    elif isinstance(operand, Pair):
        _collect(operand.first, found)
        _collect(operand.second, found)


def _reachable(name: str, uses: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Every symbol that ``name`` or a function it may call mentions."""
    found: set[str] = set()
    pending = [name]
    while pending:
        for symbol in uses.get(pending.pop(), frozenset()) - found:
            found.add(symbol)
            pending.append(symbol)
    return frozenset(found)


def parse(text: str) -> Module:
    """Parse one PTX text.

    Raises :class:`~smfree.emulator.errors.PtxError` (line, rule) for what is malformed and
    :class:`~smfree.emulator.errors.Unsupported` for what is not modelled (textures, .alias, vector
    registers). A closing NUL, as NVRTC returns it, is ignored.
    """
    parser = _Parser(Cursor(text.rstrip("\0")))
    parser.outline()
    return parser.module()
