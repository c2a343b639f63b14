"""A comparison of two runs as text."""

from __future__ import annotations

from datetime import datetime

from tabulate import tabulate

from smfree.results.compare import Comparison, RunComparison, Verdict, age_days

#: Baselines older than this are called old, whatever the verdicts say.
OLD_BASELINE_DAYS = 90


def comparison_text(result: RunComparison, *, everything: bool = False, now: datetime | None = None) -> str:
    """The report: where the baseline comes from, what differs, changed points (or all), counts."""
    lines = [_origin(result, now)]
    for difference in result.machine_differences:
        lines.append(f"machines differ: {difference}")
    shown = [point for point in result.points if everything or point.verdict is not Verdict.SAME]
    if shown:
        shown.sort(key=lambda point: (list(Verdict).index(point.verdict), -point.ratio), reverse=True)
        lines += ["", tabulate([_row(point) for point in shown], headers=_HEADERS, disable_numparse=True)]
    counts = ", ".join(f"{result.count(verdict)} {verdict.value}" for verdict in Verdict)
    lines += ["", f"{len(result.points)} points in both runs: {counts}"]
    for names, which in ((result.only_old, "baseline"), (result.only_new, "new run")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"only in the {which}: {', '.join(names[:3])}{more}")
    if result.count(Verdict.FASTER):
        lines.append(
            "some points became faster beyond the limit: save a new baseline, or a later loss will hide in it"
        )
    return "\n".join(lines)


_HEADERS = ("point", "verdict", "old", "new", "new / old", "95 % interval", "why")


def _row(point: Comparison) -> list[str]:
    return [
        point.name,
        point.verdict.value,
        time_text(point.old_s),
        time_text(point.new_s),
        f"{point.ratio:.3f}",
        f"{point.interval.low:.3f} .. {point.interval.high:.3f}",
        point.reason,
    ]


def _origin(result: RunComparison, now: datetime | None) -> str:
    days = age_days(result.old, now)
    age = "of unknown age" if days is None else f"{days:.1f} days old"
    warn = (
        f" (old: more than {OLD_BASELINE_DAYS} days)" if days is not None and days > OLD_BASELINE_DAYS else ""
    )
    return f"baseline {result.old.path}, commit {result.old.commit}, {age}{warn}; new run {result.new.path}"


def time_text(seconds: float) -> str:
    """Seconds with a unit that keeps three or four digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"
