"""The body of a function: scopes, declarations, labels, source lines, instructions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from smfree.emulator.errors import Unsupported
from smfree.emulator.ptx.ast import (
    Guard,
    Instr,
    LabelRef,
    LocalVar,
    Operand,
    Param,
    Reg,
    SourceLine,
    Symbol,
)
from smfree.emulator.ptx.declarations import (
    LINKAGE,
    VARIABLE_SPACES,
    Variable,
    parse_param,
    parse_type,
    parse_variables,
    round_up,
)
from smfree.emulator.ptx.lexer import Cursor
from smfree.emulator.ptx.operands import Scope, parse_call_operand, parse_operand, resolve


@dataclass(frozen=True, slots=True)
class DebugInfo:
    """What ``.loc`` refers to: the file table and the strings of .debug_str by label."""

    files: Mapping[int, str]
    strings: bytes
    string_labels: Mapping[str, int]

    def text(self, label: str, offset: int) -> str | None:
        """The zero-terminated string at ``label + offset``."""
        start = self.string_labels.get(label)
        if start is None:
            return None
        return self.strings[start + offset :].split(b"\0", 1)[0].decode("utf-8", "replace")


class Body:
    """Parses one function body; the results are its public attributes."""

    def __init__(self, cursor: Cursor, names: Mapping[str, Operand], debug: DebugInfo) -> None:
        self.cursor = cursor
        self.debug = debug
        self.scope = Scope(None, 0, names)
        self.scopes = 1
        self.registers: dict[str, str] = {}
        self.instrs: list[Instr] = []
        self.labels: dict[str, int] = {}
        self.shared: list[Variable] = []
        self.globals: list[Variable] = []
        self.local: dict[str, LocalVar] = {}
        self.local_bytes = 0
        self.call_params: dict[str, Param] = {}
        self.branch_targets: dict[str, tuple[str, ...]] = {}
        self._target_lists: list[tuple[str, list[str], Scope, int]] = []
        self._branches: list[tuple[int, str, Scope]] = []
        self._source: SourceLine | None = None
        self._seen: dict[tuple[int, int, int], SourceLine] = {}
        self._directives = {
            ".reg": self._registers,
            ".loc": self._loc,
            ".param": self._call_param,
            ".pragma": self._pragma,
        }

    def parse(self) -> Body:
        """Parse from the opening brace to the closing one."""
        cursor = self.cursor
        opened_at = cursor.line
        cursor.expect("{", "before a function body")
        depth, texts = 1, cursor.texts
        while True:
            text = texts[cursor.pos]
            first = text[:1]
            if first == ".":
                self._directive(text)
            elif first == "@" or (texts[cursor.pos + 1] != ":" and (first.isalpha() or first == "_")):
                self._instruction()
            elif first == "{":
                cursor.pos += 1
                depth += 1
                self.scope = Scope(self.scope, self.scopes)
                self.scopes += 1
            elif first == "}":
                cursor.pos += 1
                depth -= 1
                if depth == 0:
                    break
                assert self.scope.parent is not None
                self.scope = self.scope.parent
            elif texts[cursor.pos + 1] == ":":
                self._label()
            elif not text:
                cursor.fail(f"the function body of line {opened_at} is never closed", line=opened_at)
            else:
                cursor.fail(f"expected an instruction, got '{text}'")
        self._resolve_branches()
        return self

    # --------------------------------------------------------------------------------------- directives

    def _directive(self, text: str) -> None:
        cursor = self.cursor
        handler = self._directives.get(text)
        if handler is not None:
            cursor.pos += 1
            handler()
        elif text in VARIABLE_SPACES or text in LINKAGE:
            linkage = set()
            while cursor.peek() in LINKAGE:
                linkage.add(cursor.next())
            if cursor.peek() not in VARIABLE_SPACES:
                cursor.fail(f"'{cursor.peek()}' cannot be declared inside a function")
            for variable in parse_variables(cursor, frozenset(linkage)):
                self._variable(variable)
        else:
            cursor.fail(f"directive '{text}' is not known inside a function", rule="ptx.directive")

    def _declare(self, name: str, operand: Operand) -> None:
        if name in self.scope.names and (self.scope.serial or name in self.registers or name in self.local):
            self.cursor.fail(f"'{name}' is declared twice in one scope; rename one", rule="ptx.duplicate")
        self.scope.names[name] = operand

    def _registers(self) -> None:
        cursor, scope = self.cursor, self.scope
        type_name, lanes = parse_type(cursor)
        if lanes > 1:
            raise Unsupported(
                f"PTX line {cursor.line}: vector registers (.v{lanes}) are not modelled; use {{scalars}}",
                rule="ptx.vector_register",
            )
        while True:
            name = cursor.next()
            names = [name]
            if cursor.accept("<"):
                names = [f"{name}{i}" for i in range(cursor.count("a count of registers"))]
            for one in names:
                unique = scope.unique(one)
                self._declare(one, Reg(unique))
                self.registers[unique] = type_name
            if not cursor.accept(","):
                break
        cursor.expect(";", "after a .reg declaration")

    def _variable(self, variable: Variable) -> None:
        name = variable.name
        variable.name = self.scope.unique(name)
        self._declare(name, Symbol(variable.name))
        if variable.space == "shared":
            self.shared.append(variable)
        elif variable.space == "local":
            if variable.size_bytes is None:
                self.cursor.fail(f".local array {name} needs a size", rule="ptx.local")
            offset = round_up(self.local_bytes, variable.align)
            self.local[variable.name] = LocalVar(variable.name, variable.align, variable.size_bytes, offset)
            self.local_bytes = offset + variable.size_bytes
        else:
            self.globals.append(variable)

    def _call_param(self) -> None:
        cursor = self.cursor
        cursor.pos -= 1
        param = parse_param(cursor, 0)
        cursor.expect(";", "after a .param declaration")
        unique = self.scope.unique(param.name)
        self._declare(param.name, Symbol(unique))
        self.call_params[unique] = replace(param, name=unique)

    def _pragma(self) -> None:
        cursor = self.cursor
        while True:
            text = cursor.next()
            if not text.startswith('"'):
                cursor.fail(f"a .pragma is a string, got '{text}'")
            if not cursor.accept(","):
                break
        cursor.expect(";", "after a .pragma")

    def _loc(self) -> None:
        cursor = self.cursor
        place = self._place()
        function: str | None = None
        outer: SourceLine | None = None
        while cursor.accept(","):
            word = cursor.next()
            if word == "function_name":
                label = cursor.next()
                offset = cursor.integer("an offset") if cursor.accept("+") else 0
                function = self.debug.text(label, offset)
            elif word == "inlined_at":
                at = self._place()
                outer = self._seen.get(at) or self._line_of(at, None, None)
            else:
                cursor.fail(f"'{word}' is not known in a .loc")
        self._source = self._line_of(place, outer, function)
        if self._source is not None:
            self._seen[place] = self._source

    def _place(self) -> tuple[int, int, int]:
        cursor = self.cursor
        try:
            place = (int(cursor.next()), int(cursor.next()), int(cursor.next()))
        except ValueError:
            cursor.fail(".loc takes file, line and column as numbers", line=cursor.lines[cursor.pos - 1])
        return place

    def _line_of(
        self, place: tuple[int, int, int], outer: SourceLine | None, function: str | None
    ) -> SourceLine | None:
        """Line 0 means that the compiler knows no line."""
        file, line, _ = place
        if line == 0:
            return None
        return SourceLine(self.debug.files.get(file, f"file {file}"), line, outer, function)

    # ----------------------------------------------------------------------------- labels and branches

    def _label(self) -> None:
        cursor = self.cursor
        name = cursor.next()
        cursor.pos += 1
        ahead = cursor.peek()
        if ahead == ".branchtargets":
            self._branch_targets(name)
            return
        if ahead in (".callprototype", ".calltargets"):
            while cursor.next() != ";":
                pass
            self.scope.labels[name] = self.scope.unique(name)
            return
        if name in self.scope.labels:
            cursor.fail(f"label '{name}' is defined twice in one scope; rename one", rule="ptx.duplicate")
        unique = self.scope.unique(name)
        self.scope.labels[name] = unique
        self.labels[unique] = len(self.instrs)

    def _branch_targets(self, name: str) -> None:
        cursor = self.cursor
        line = cursor.line
        cursor.pos += 1
        targets: list[str] = []
        while True:
            target = cursor.next()
            if cursor.accept("<"):
                targets += [f"{target}{i}" for i in range(cursor.count("a count of labels"))]
            else:
                targets.append(target)
            if not cursor.accept(","):
                break
        cursor.expect(";", "after .branchtargets")
        unique = self.scope.unique(name)
        self.scope.labels[name] = unique
        self._target_lists.append((unique, targets, self.scope, line))

    def _resolve_branches(self) -> None:
        for unique, targets, scope, line in self._target_lists:
            self.branch_targets[unique] = tuple(self._label_from(scope, t, line) for t in targets)
        for index, name, scope in self._branches:
            instr = self.instrs[index]
            ref = LabelRef(self._label_from(scope, name, instr.line))
            self.instrs[index] = replace(instr, operands=(*instr.operands, ref))

    def _label_from(self, scope: Scope, name: str, line: int) -> str:
        label = scope.find_label(name)
        if label is None:
            self.cursor.fail(
                f"unknown label '{name}': a branch reaches labels of its own block and of those around it, "
                f"not of an inner or neighbouring block",
                rule="ptx.label",
                line=line,
            )
        return label

    # -------------------------------------------------------------------------------------- instructions

    def _instruction(self) -> None:
        cursor, scope = self.cursor, self.scope
        texts, start = cursor.texts, cursor.pos
        guard: Guard | None = None
        if texts[start] == "@":
            cursor.pos += 1
            negated = cursor.accept("!")
            name = cursor.next()
            reg = resolve(cursor, scope, name)
            if not isinstance(reg, Reg) or self.registers.get(reg.name) != "pred":
                cursor.fail(
                    f"the guard {name} is no predicate register", rule="ptx.guard", line=cursor.lines[start]
                )
            guard = Guard(reg, negated)
        opcode, *modifiers = cursor.next().split(".")
        while texts[cursor.pos][:1] == ".":
            modifiers += cursor.next()[1:].split(".")
        if not opcode.isidentifier():
            cursor.fail(f"expected an opcode, got '{opcode}'", line=cursor.lines[start])
        operands: list[Operand] = []
        if texts[cursor.pos] != ";":
            if opcode in ("bra", "brx"):
                operands = self._branch_operands(opcode)
            else:
                parse = parse_call_operand if opcode == "call" else parse_operand
                while True:
                    operands.append(parse(cursor, scope))
                    if texts[cursor.pos] != ",":
                        break
                    cursor.pos += 1
        end = cursor.pos
        cursor.expect(";", f"after {opcode}")
        self.instrs.append(
            Instr(
                opcode,
                tuple(modifiers),
                tuple(operands),
                guard,
                cursor.lines[start],
                self._source,
                cursor.text_between(start, end),
            )
        )

    def _branch_operands(self, opcode: str) -> list[Operand]:
        cursor = self.cursor
        operands: list[Operand] = []
        if opcode == "brx":
            operands.append(parse_operand(cursor, self.scope))
            cursor.expect(",", "after the index of brx.idx")
        self._branches.append((len(self.instrs), cursor.next(), self.scope))
        return operands
