"""Lanes of bars as an SVG: no dependencies, the same bytes for the same lanes, readable on light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from smfree.timeline.lanes import MEANING, Bar, Kind, Lane, Panel, Timeline

WIDTH, GUTTER, MARGIN = 1000, 160, 14
TALL, THIN, GAP = 22, 11, 4
CHARACTER = 6.1  # pixels of one character of the small text

_KINDS = (
    Kind.RUN, Kind.WORK, Kind.WAIT, Kind.LOAD, Kind.HOLD, Kind.STORE, Kind.EVEN, Kind.ODD,
)  # fmt: skip
_LIGHT = ("#afb8c1", "#4ac26b", "#eaeef2", "#54aeff", "#cfe8ff", "#fb8f44", "#e7dcfb", "#c297ff")
_DARK = ("#57606a", "#238636", "#21262d", "#1f6feb", "#12304f", "#bd561d", "#3c2a63", "#7a4fc4")


def draw(timeline: Timeline, *, title: str = "", start: float = 0.0, end: float | None = None) -> str:
    """The picture of cycles ``start`` to ``end`` (default: all), every launch on the same scale.

    Raises ValueError when nothing lies between the two.
    """
    last = max(panel.cycles for panel in timeline.panels)
    end = last if end is None else min(end, last)
    if not 0 <= start < end:
        raise ValueError(
            f"the picture must begin before it ends (got {start:g} to {end:g} of {last:g} cycles)"
        )
    canvas = _Canvas(start, end)
    heading = title or f"Timeline on {timeline.device}"
    heading += f", {timeline.clock}"
    canvas.text(MARGIN, 24, heading, "title")
    canvas.legend(46, {bar.kind for panel in timeline.panels for lane in panel.lanes for bar in lane.bars})
    y = 64.0
    for panel in timeline.panels:
        y = canvas.panel(panel, y, timeline)
    note = f"SM cycles since the launch began, {timeline.clock}"
    return canvas.document(canvas.axis(y, note), heading)


class _Canvas:
    """Collects the elements of one picture; x is time from ``start`` to ``end``."""

    def __init__(self, start: float, end: float) -> None:
        self._start, self._end = start, end
        self._scale = (WIDTH - GUTTER - MARGIN) / (end - start)
        self._parts: list[str] = []
        self._plots: list[tuple[float, float]] = []  # top and bottom of each panel's lanes

    def _x(self, cycles: float) -> float:
        return GUTTER + (min(max(cycles, self._start), self._end) - self._start) * self._scale

    def text(self, x: float, y: float, words: str, style: str) -> None:
        self._parts.append(f'<text x="{_n(x)}" y="{_n(y)}" class="{style}">{_shown(words)}</text>')

    def _right(self, y: float, words: str, style: str) -> None:
        place = f'x="{WIDTH - MARGIN}" y="{_n(y)}"'
        self._parts.append(f'<text {place} class="{style}" text-anchor="end">{_shown(words)}</text>')

    def legend(self, y: float, kinds: Iterable[Kind]) -> None:
        present = set(kinds)
        x = float(MARGIN)
        for kind, meaning in MEANING.items():
            if kind in present:
                place = f'x="{_n(x)}" y="{_n(y - 9)}" width="14" height="10"'
                self._parts.append(f'<rect {place} class="{kind.value}"/>')
                self.text(x + 19, y, meaning, "small")
                x += 19 + len(meaning) * CHARACTER + 14

    def panel(self, panel: Panel, y: float, timeline: Timeline) -> float:
        """One launch; gives the y below it."""
        time = panel.cycles / timeline.sm_clock_mhz
        self.text(MARGIN, y + 14, panel.title, "name")
        words = f"{panel.cycles:.0f} cycles, {time:.2f} us {timeline.clock}"
        self._right(y + 14, words, "name")
        y = top = y + 22
        for lane in panel.lanes:
            y = self._lane(lane, y)
        self._plots.append((top, y))
        return y + 14

    def _lane(self, lane: Lane, y: float) -> float:
        height = THIN if lane.thin else TALL
        style = "tiny" if lane.thin else "small"
        self.text(MARGIN, y + height / 2 + 3.5, lane.name, style)
        for bar in lane.bars:
            self._bar(bar, y, height)
        return y + height + (1 if lane.thin else GAP)

    def _bar(self, bar: Bar, y: float, height: float) -> None:
        left, right = self._x(bar.start), self._x(bar.end)
        if right <= left or bar.end <= self._start or bar.start >= self._end:
            return
        width = right - left
        detail = f"{bar.detail} ({bar.start:.0f} to {bar.end:.0f})"
        self._parts.append(
            f'<rect x="{_n(left)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" '
            f'class="{bar.kind.value}"><title>{_shown(detail)}</title></rect>'
        )
        fitting = next((words for words in bar.texts if len(words) * CHARACTER + 4 <= width), "")
        if fitting:
            style = "tiny" if height == THIN else "small"
            self.text(left + 3, y + height / 2 + 3.5, fitting, f"{style} on")

    def axis(self, y: float, note: str) -> float:
        """Ticks at round numbers through all panels; gives the picture's height."""
        step = _round_step((self._end - self._start) / 8)
        lines = []
        tick = math.ceil(self._start / step) * step
        while tick <= self._end:
            x = _n(self._x(tick))
            lines += [f'<path d="M{x} {_n(top)}V{_n(bottom)}" class="grid"/>' for top, bottom in self._plots]
            self._parts.append(
                f'<text x="{x}" y="{_n(y + 6)}" class="small" text-anchor="middle">{tick:g}</text>'
            )
            tick += step
        self._parts[0:0] = lines  # behind the bars
        self.text(MARGIN, y + 6, "cycles", "small")
        self._right(y + 24, note, "small")
        return y + 34

    def document(self, height: float, heading: str) -> str:
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_n(height)}" width="{WIDTH}" '
            f'height="{_n(height)}" role="img" aria-label="{_shown(heading)}">\n'
            f"<style>\n{_style()}</style>\n"
            f'<rect width="{WIDTH}" height="{_n(height)}" rx="6" class="paper"/>\n{body}\n</svg>\n'
        )


def _shown(words: str) -> str:
    """Text that XML can hold: control characters become spaces."""
    return escape("".join(letter if letter.isprintable() else " " for letter in words))


def _style() -> str:
    def colours(paper: str, ink: str, grid: str, fills: Sequence[str]) -> str:
        listed = "".join(
            f".{kind.value}{{fill:{colour}}}" for kind, colour in zip(_KINDS, fills, strict=True)
        )
        return f".paper{{fill:{paper}}}text{{fill:{ink}}}.grid{{stroke:{grid}}}{listed}"

    return (
        "text{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:10px}\n"
        ".title{font-size:15px;font-weight:600}.name{font-size:11px;font-weight:600}.tiny{font-size:8px}\n"
        ".on{pointer-events:none}.grid{stroke-width:1;stroke-dasharray:2 3}\n"
        f"{colours('#ffffff', '#1f2328', '#d0d7de', _LIGHT)}\n"
        f"@media (prefers-color-scheme:dark){{{colours('#0d1117', '#e6edf3', '#30363d', _DARK)}}}\n"
    )


def _round_step(about: float) -> float:
    """1, 2 or 5 times a power of ten, not below ``about`` and at least 1."""
    power = 10.0 ** math.floor(math.log10(max(about, 1.0)))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= about)


def _n(value: float) -> str:
    """A coordinate: one decimal, no trailing zero."""
    return f"{value:.1f}".removesuffix(".0")
