"""The command line: ``smfree devices``, ``compare OLD NEW``, ``timeline TRACE`` and ``predict``."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from smfree.model.collectives import NVLINK_4, RDMA_400G, Link
from smfree.model.predict import Cluster, bytes_of, prediction_text
from smfree.results.compare import Limits, Verdict, compare_runs
from smfree.results.report import comparison_text
from smfree.results.store import load_run
from smfree.timeline.lanes import load
from smfree.timeline.svg import draw

BROKEN_PIPE = 141
"""128 + SIGPIPE, what a shell shows of a program that this signal ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 = good, 1 = a point is slower (compare), 2 = wrong use, 141 = nobody reads on."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # as of `| head -1`; what is still buffered goes nowhere, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="smfree", description="Who should move my bytes?")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("devices", help="list the GPUs here and those that can be emulated")
    compare = commands.add_parser(
        "compare",
        help="compare two saved runs point by point: SAME, FASTER, SLOWER, UNSURE",
        description="Exit code 1 when a point is SLOWER, 2 when the files cannot be compared.",
    )
    compare.add_argument(
        "old", type=Path, help="baseline: a JSON of --benchmark-json or --benchmark-autosave"
    )
    compare.add_argument("new", type=Path, help="the run to judge")
    compare.add_argument("--limit", type=_number, default=5.0, metavar="PERCENT", help="default: %(default)s")
    compare.add_argument(
        "--floor-ns",
        type=_number,
        default=20.0,
        metavar="NS",
        help="differences below this are SAME whatever their share; default: %(default)s",
    )
    compare.add_argument("--all", action="store_true", help="also list points that are the SAME")
    picture = commands.add_parser(
        "timeline",
        help="draw a trace of an emulated launch: waits, copies in flight, barrier phases",
        description="TRACE is what Trace.save writes; all times are modelled.",
    )
    picture.add_argument("trace", type=Path, help="a JSON made with device.trace()")
    picture.add_argument("-o", "--output", type=Path, required=True, metavar="PICTURE.svg")
    picture.add_argument("--title", default="", help="default: the device")
    picture.add_argument("--from", dest="start", type=_number, default=0.0, metavar="CYCLES")
    picture.add_argument(
        "--to", dest="end", type=_number, metavar="CYCLES", help="default: the last launch's end"
    )
    predict = commands.add_parser(
        "predict",
        help="what an AllReduce should take by each algorithm, from alpha and beta of the links",
        description="Steps, bytes sent per rank, times, who is fastest, and many nodes. All times are "
        "modelled. The default links are those often quoted, not measured.",
    )
    predict.add_argument(
        "--bytes", type=_bytes, required=True, metavar="S", help="of a rank, as 140e9, 64KiB or 1GB"
    )
    predict.add_argument("--ranks", type=int, required=True, metavar="N")
    predict.add_argument("--node-size", type=int, default=8, metavar="N", help="default: %(default)s ranks")
    for name, flag, where, link in (
        ("inside", "", "in a node", NVLINK_4),
        ("across", "across-", "between nodes", RDMA_400G),
    ):
        predict.add_argument(
            f"--{flag}alpha-us", dest=f"{name}_alpha_s", type=lambda us: _number(us) * 1e-6,
            default=link.alpha_s, metavar="US",
            help=f"start-up of a step {where}; default: {link.alpha_s * 1e6:g}",
        )  # fmt: skip
        predict.add_argument(
            f"--{flag}beta-gbps", dest=f"{name}_beta", type=lambda gbps: _number(gbps) * 1e9,
            default=link.bytes_per_s, metavar="GB/S",
            help=f"of a rank {where}, one way; default: {link.bytes_per_s / 1e9:g}",
        )  # fmt: skip
    given = parser.parse_args(arguments)
    try:
        if given.command == "devices":
            return devices()
        if given.command == "timeline":
            return draw_timeline(given.trace, given.output, given.title, given.start, given.end)
        if given.command == "predict":
            inside = Link(given.inside_alpha_s, given.inside_beta)
            across = Link(given.across_alpha_s, given.across_beta)
            print(prediction_text(Cluster(given.node_size, inside, across), given.bytes, given.ranks))
            return 0
        return compare_files(
            given.old, given.new, Limits(given.limit / 100, given.floor_ns * 1e-9), everything=given.all
        )
    except ValueError as error:
        print(f"smfree {given.command}: {error}", file=sys.stderr)
        return 2


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:  # NaN fails, too
        raise argparse.ArgumentTypeError(f"a number from 0 on is needed (got {text})")
    return value


def _bytes(text: str) -> float:
    try:
        return bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def compare_files(old: Path, new: Path, limits: Limits, *, everything: bool = False) -> int:
    """Print the comparison of two files; 1 when a point is slower."""
    result = compare_runs(load_run(old), load_run(new), limits)
    print(comparison_text(result, everything=everything))
    if not result.points:  # a gate must not be green because it looked at nothing
        raise ValueError(f"{old} and {new} have no point in common; compare runs of one device")
    return 1 if result.count(Verdict.SLOWER) else 0


def draw_timeline(trace: Path, output: Path, title: str, start: float, end: float | None) -> int:
    """Draw a trace file as SVG. Raises ValueError for a file that is no trace or cannot be written."""
    try:
        picture = draw(load(trace), title=title, start=start, end=end)
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"{trace} is damaged ({error}); trace again") from error
    try:
        output.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{output} cannot be written ({error.strerror}); make its folder first") from error
    print(f"{output} drawn, times modelled")
    return 0


def devices() -> int:
    """Print one line per device string that works here."""
    from smfree.cuda import Device
    from smfree.cuda.choose import profiles, real_devices

    reason, count = real_devices()
    specs = [f"cuda:{ordinal}" for ordinal in range(count)] + [f"emu:{name}" for name in profiles()]
    if reason:
        print(f"no real GPU: {reason}")
    for spec in specs:
        with Device.open(spec) as device:
            can = device.capabilities
            print(
                f"{spec:10} {device.name}, {can.arch}, {can.num_sms} SMs, {can.l2_bytes >> 20} MiB L2, "
                f"{can.peak_memory_gbps:.0f} GB/s, times {device.clock_source}"
            )
    print("several: cuda is all real GPUs, emu:h100x8 a node of eight emulated ones, emu:h100x8:3 one of it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
