"""Fenced blocks and commands of the Markdown pages, for tests that hold them against the repository."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = tuple(sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))))

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block. ``line`` is the page's line of its first line."""

    page: Path
    language: str
    text: str
    line: int

    @property
    def id(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One line of a console block, without its prompt and comment."""

    page: str
    words: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, found[1], found[2], text.count("\n", 0, found.start(2)) + 1)
        for found in _FENCE.finditer(text)
    ]


def examples() -> list[tuple[Block, str | None]]:
    """Each Python block with the text block that follows it at once, which is its output."""
    found = []
    for page in PAGES:
        listed = blocks(page)
        text = page.read_text(encoding="utf-8")
        for block, after in zip(listed, [*listed[1:], None], strict=False):
            if block.language != "python":
                continue
            follows = after is not None and after.language == "text" and f"{block.text}```\n\n```text" in text
            found.append((block, after.text if after is not None and follows else None))
    return found


def commands() -> list[Command]:
    """Every command of every console block, once."""
    found: dict[Command, None] = {}
    for page in PAGES:
        for block in blocks(page):
            if block.language == "console":
                for line in block.text.splitlines():
                    assert line.startswith("$ "), f"{block.id}: a console block holds commands only ({line})"
                    found[Command(page.name, tuple(shlex.split(line[2:], comments=True)))] = None
    return list(found)
