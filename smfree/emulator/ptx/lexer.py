"""PTX text to tokens, and the cursor that the parser moves over them (with constant expressions)."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import NoReturn

from smfree.emulator.errors import PtxError
from smfree.emulator.ptx.ast import Imm

# One expression for every token; floats come before integers. A name swallows its dotted suffixes, so
# "ld.global.v4.u32" and "%tid.x" are one token each.
_TOKEN = re.compile(
    r"""[^\S\n]*(?:
      (?P<skip>\n|//[^\n]*|/\*.*?\*/)
    | (?P<token>
        [A-Za-z_$][\w$]*(?:\.\w+(?:::\w+)*)*
      | %[\w$]+(?:\.\w+)*
      | \.[A-Za-z_]\w*(?:::\w+)*(?:\.\w+(?:::\w+)*)*
      | 0[fF][0-9a-fA-F]{8}\b | 0[dD][0-9a-fA-F]{16}\b
      | 0[xX][0-9a-fA-F]+U?\b | 0[bB][01]+U?\b
      | (?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?\b | \d+\.(?!\w) | \d+[eE][-+]?\d+\b
      | (?:0[0-7]*|[1-9]\d*)U?\b
      | "[^"\n]*"
      | <<|>>|&&|\|\||==|!=|<=|>=
      | [][{}(),;:@!|+\-*/<>=&^~?]
      )
    | (?P<bad>\S)
    )""",
    re.VERBOSE | re.DOTALL,
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_MASK64 = (1 << 64) - 1

# Binary operators of constant expressions, by precedence (higher binds tighter).
_PRECEDENCE = {
    "||": 1, "&&": 2, "|": 3, "^": 4, "&": 5, "==": 6, "!=": 6,
    "<": 7, ">": 7, "<=": 7, ">=": 7, "<<": 8, ">>": 8, "+": 9, "-": 9, "*": 10, "/": 10,
}  # fmt: skip


def _divide(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_OPERATOR: dict[str, Callable[[int, int], int]] = {
    "||": lambda a, b: int(bool(a) or bool(b)),
    "&&": lambda a, b: int(bool(a) and bool(b)),
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
    "<<": lambda a, b: (a << (b & 63)) & _MASK64,
    ">>": lambda a, b: a >> (b & 63),
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divide,
}


def literal(token: str) -> Imm | None:
    """The constant a number token stands for; None if ``token`` is no number."""
    head = token[:2]
    if not (head[:1].isdigit() or (head[:1] == "." and head[1:].isdigit())):
        return Imm(32) if token == "WARP_SZ" else None
    if head in ("0f", "0F"):
        bits = int(token[2:], 16)
        return Imm(struct.unpack("<f", struct.pack("<I", bits))[0], bits, 32)
    if head in ("0d", "0D"):
        bits = int(token[2:], 16)
        return Imm(struct.unpack("<d", struct.pack("<Q", bits))[0], bits, 64)
    digits = token.rstrip("U")
    if head in ("0x", "0X", "0b", "0B"):
        return Imm(int(digits, 0))
    if digits.isdigit():
        return Imm(int(digits, 8) if digits[0] == "0" and len(digits) > 1 else int(digits))
    return _double(float(token))


def _double(value: float) -> Imm:
    return Imm(value, struct.unpack("<Q", struct.pack("<d", value))[0], 64)


class Cursor:
    """A position in the token list; ``texts`` ends with empty strings, so looking one ahead is safe."""

    __slots__ = ("lines", "pos", "source", "starts", "texts")

    def __init__(self, source: str) -> None:
        self.source = source
        self.pos = 0
        self.texts: list[str] = []
        self.lines: list[int] = []
        self.starts: list[int] = []
        line = 1
        texts, lines, starts = self.texts.append, self.lines.append, self.starts.append
        for match in _TOKEN.finditer(source):
            kind = match.lastgroup
            text = match.group(kind) if kind else ""
            if kind == "token":
                texts(text)
                lines(line)
                starts(match.start("token"))
            elif kind == "skip":
                line += text.count("\n")
            else:
                raise PtxError(f"character {text!r} starts no PTX token", line=line, rule="ptx.syntax")
        for _ in range(2):
            texts("")
            lines(line)
            starts(len(source))

    @property
    def line(self) -> int:
        """PTX line of the token ahead."""
        return self.lines[self.pos]

    def peek(self) -> str:
        """The token ahead; "" at the end of the text."""
        return self.texts[self.pos]

    def next(self) -> str:
        """Take the token ahead."""
        text = self.texts[self.pos]
        if not text:
            self.fail("the text ends in the middle of a statement; look for a missing '}' or ';'")
        self.pos += 1
        return text

    def accept(self, text: str) -> bool:
        """Take the token ahead if it is ``text``."""
        if self.texts[self.pos] == text:
            self.pos += 1
            return True
        return False

    def expect(self, text: str, where: str) -> None:
        """Take ``text`` or fail, saying where it is needed."""
        if self.texts[self.pos] != text:
            got = self.texts[self.pos] or "the end of the text"
            self.fail(f"expected '{text}' {where}, got '{got}'")
        self.pos += 1

    def fail(self, message: str, *, rule: str = "ptx.syntax", line: int | None = None) -> NoReturn:
        """Raise :class:`PtxError` at ``line``, by default at the token ahead."""
        raise PtxError(message, line=self.line if line is None else line, rule=rule)

    def text_between(self, first: int, last: int) -> str:
        """The source from token ``first`` up to token ``last`` (excluded), comments out, blanks squeezed."""
        text = self.source[self.starts[first] : self.starts[last]]
        if "/" in text:
            text = _COMMENT.sub(" ", text)
        return " ".join(text.split())

    def skip_braces(self) -> None:
        """Skip a block; the token ahead is its '{'."""
        opened_at = self.line
        self.expect("{", "before a block")
        depth, texts, pos = 1, self.texts, self.pos
        while depth:
            text = texts[pos]
            if text == "{":
                depth += 1
            elif text == "}":
                depth -= 1
            elif not text:
                self.fail(f"the '{{' of line {opened_at} is never closed", line=opened_at)
            pos += 1
        self.pos = pos

    # ------------------------------------------------------------------------------- constant expressions

    def integer(self, what: str) -> int:
        """An integer constant expression, for ``what``."""
        value = self.constant(what).value
        if isinstance(value, float):
            self.fail(f"{what} must be an integer constant, got {value}")
        return value

    def count(self, what: str) -> int:
        """The n of ``name<n>``; '<' has been taken, '>' is taken too."""
        value = self.constant(what, _PRECEDENCE["<"]).value
        if isinstance(value, float) or value < 0:
            self.fail(f"{what} must be a natural number, got {value}")
        self.expect(">", f"after {what}")
        return value

    def constant(self, what: str = "a constant", precedence: int = 0) -> Imm:
        """A constant expression; floats know only the sign."""
        left = self._unary(what)
        while True:
            operator = self.texts[self.pos]
            level = _PRECEDENCE.get(operator, 0)
            if level <= precedence:
                break
            self.pos += 1
            right = self.constant(what, level)
            if isinstance(left.value, float) or isinstance(right.value, float):
                self.fail(f"'{operator}' between floating-point constants is not modelled; write the value")
            if operator == "/" and right.value == 0:
                self.fail("division by zero in a constant expression")
            left = Imm(_OPERATOR[operator](left.value, right.value))
        if precedence == 0 and self.accept("?"):
            yes = self.constant(what)
            self.expect(":", "in a conditional constant")
            no = self.constant(what)
            return yes if left.value else no
        return left

    def _unary(self, what: str) -> Imm:
        text = self.next()
        if text == "(":
            inner = self.constant(what)
            self.expect(")", "after a constant expression")
            return inner
        if text in ("-", "+", "~", "!"):
            return self._signed(text, self._unary(what))
        value = literal(text)
        if value is None:
            self.pos -= 1
            self.fail(f"expected {what}, got '{text}'")
        return value

    def _signed(self, sign: str, inner: Imm) -> Imm:
        if sign == "+":
            return inner
        if isinstance(inner.value, float):
            if sign != "-" or inner.bits is None or inner.width is None:
                self.fail(f"'{sign}' does not apply to the floating-point constant {inner.value}")
            return Imm(-inner.value, inner.bits ^ (1 << (inner.width - 1)), inner.width)
        return Imm({"-": -inner.value, "~": ~inner.value, "!": int(not inner.value)}[sign])
