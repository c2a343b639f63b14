"""Run kernels and copies on emulated nodes and set them beside public numbers: docs/published.md.

    python scripts/published.py                 # write the page; `make docs` calls it (three minutes)
    python scripts/published.py --out page.md   # elsewhere

All computed numbers are modelled. Public ones are from elsewhere, each with its source; a row that fixed a
parameter of the profile tests nothing, and says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the script runs from anywhere, with nothing installed

from scripts.published_runs import (  # noqa: E402
    KIB,
    MIB,
    MOVES,
    PULLS,
    SATURATED,
    SPREAD,
    Config,
    Spread,
    copy_gbps,
    copy_us,
    described,
    flag_us,
    gather_us,
    one_way_gbps,
    open_ms,
    pulling,
    puts_us,
    reduce_gbps,
    shifts,
    spread,
    threads,
    tiles,
)
from smfree.emulator.profile import load  # noqa: E402
from smfree.model.crossover import format_bytes  # noqa: E402

PAGE = ROOT / "docs" / "published.md"


# --- rows -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A public number, and how the same is run here."""

    id: str
    gpu: str
    public: float
    unit: str
    how: str
    modelled: Callable[[], float]

    def cells(self) -> list[str]:
        """The row's cells in the page."""
        value, fixed = self.modelled(), fixed_by(self)
        error = f"{value / self.public - 1:+.0%}"
        verdict = f"fixed {', '.join(fixed)}" if fixed else error
        return [self.id, self.gpu, self.how, self.unit, f"{self.public:g}", f"{value:.3g}", verdict]


def fixed_by(row: Row) -> list[str]:
    """The parameters that the row has fixed: it tests nothing then."""
    if row.id == "ipc-open":
        return ["what opening costs"]
    profile = load(row.gpu)
    if row.id not in profile.fixed_by:
        return []
    return [f"`{path}`" for path, (_, source) in profile.notes.items() if row.id in source]


def copied(name: str, gpu: str, nbytes: int, public: float, text: str) -> Row:
    return Row(name, gpu, public, "GB/s", f"copy engine, {text}", lambda: copy_gbps(gpu, nbytes))


def pushed(name: str, gpu: str, public: float, config: Config, ctas: int) -> Row:
    how = f"{described(config)}, {ctas} SM{'s' if ctas > 1 else ''}"
    return Row(name, gpu, public, "GB/s", how, lambda: one_way_gbps(gpu, config, ctas))


def summed(name: str, gpu: str, way: str, public: float) -> Row:
    how = f"`{way}`, 8 GPUs: bus bandwidth of an AllReduce (between 16 and 32 MiB)"
    return Row(name, gpu, public, "GB/s", how, lambda: reduce_gbps(gpu, way))


ROWS = (
    pushed("h20-sm-reg", "h20", 37, threads(1024), 1),
    pushed("h20-sm-tma", "h20", 43, tiles(16 * KIB, 4), 1),
    pushed("h20-p2p-128-reg", "h20", 354, threads(1024), 16),
    pushed("h20-p2p-2k-reg", "h20", 370, threads(1024), 16),
    pushed("h20-p2p-128-tma", "h20", 46, tiles(128, 2), 78),
    pushed("h20-p2p-128-tma", "h20", 46, tiles(128, 8), 78),
    pushed("h20-p2p-2k-tma", "h20", 353, tiles(2 * KIB, 8), 78),
    pushed("h20-p2p-64k-tma", "h20", 373, tiles(64 * KIB, 3), 8),
    Row("h20-ce-alpha", "h20", 2.66, "us", "copy engine, 1 B", lambda: copy_us("h20", 1)),
    copied("h20-p2p-128-ce", "h20", 128, 0.06, "128 B"),
    copied("h20-p2p-2k-ce", "h20", 2 * KIB, 0.82, "2 KiB"),
    copied("h20-p2p-64k-ce", "h20", 64 * KIB, 24, "64 KiB"),
    copied("h20-p2p-1g-ce", "h20", 1024 * MIB, 397, "1 GiB (from 16 and 64 MiB)"),
    copied("a100-ce-p2p", "a100", 256 * MIB, 276, "256 MiB (from 16 and 64 MiB)"),
    pushed("h100-p2p-sm", "h100", 376.8, threads(1024), 16),
    copied("nvlink-ce-frac", "b200", 256 * MIB, 729, "256 MiB (from 16 and 64 MiB); 81 % of 900"),
    pushed("nvlink-tma-frac", "b200", 666, tiles(2 * KIB, 8), 64),
    Row("flag-nvlink", "h20", 1.22, "us", "`flag_latency`: released flag, one way", lambda: flag_us("h20")),
    Row(
        "ce-call-h100", "h100", 3.55, "us", "16 copies of 1 B, host and device",
        lambda: puts_us("h100", batched=False),
    ),
    Row(
        "ce-call-h100", "h100", 2.3, "us", "the same in one cuMemcpyBatchAsync",
        lambda: puts_us("h100", batched=True),
    ),
    summed("ar-ring-h100", "h100", "ring.sm", 367),
    summed("ar-nvls-h100", "h100", "nvls", 480),
    Row("ipc-open", "h100", 1.33, "ms", "cuIpcOpenMemHandle, 2 MiB", lambda: open_ms("h100")),
)  # fmt: skip


# --- the page ---------------------------------------------------------------------------------------------

HEAD = """\
# Modelled beside published

Written by `scripts/published.py` (`make docs`), which runs the kernels of `kernels/ipc` and `kernels/reduce`
and plain copies on emulated nodes. Every computed number is **modelled**: a first-order clock, not a GPU
([emulator.md](emulator.md) says what it leaves out). The public numbers are from elsewhere; none says
anything about the GPU at hand.

Pushes and pulls go one way, from rank 0 to rank 1, out of DRAM: an AllGather in which the other rank has
nothing to send. Their rate is the slope between two lengths, so launch and barriers cancel; so is that of
AllReduces. Copies are timed on their stream behind a blocker, their start-up included. What arrived is
compared before a number is taken.

## Row by row

A row that fixed a parameter tests nothing: it says which one instead of an error.
"""

SOURCES = """
`h20-*`: stmoonar/tileccl, plot script; `flag-nvlink`: its analysis, a card of the H20's class.
`a100-ce-p2p`: NVIDIA/nvbandwidth, README. `h100-p2p-sm`: NVIDIA/gpu-driver-container#149. `nvlink-*`:
ParallelKittens, arXiv 2511.13940, second hand. `ar-ring-h100`: NVIDIA/nccl#1455, 365 to 370; `ar-nvls-h100`:
NVIDIA/nccl-tests#212. `ce-call-h100`: meta-pytorch/torchcomms#2195. `ipc-open`:
rapidsai/ucx-py#334 (2019, GPU not named).
"""

MISSES = """
What misses, and why:

- **One SM is too fast** (`h20-sm-reg`, `h20-sm-tma`): latency grows only by queueing in the model, so an
  SM that keeps DRAM and link busy sees the latencies of idle ones. The next section has the numbers.
- **128-byte messages of the TMA**: two rows, because the source gives no bytes in flight. Two tiles in
  flight per SM are too slow, eight too fast; the public number lies between, and nothing follows from
  them.
- **A full link** is 4 to 6 % too slow for threads and the TMA on H20 and H100 (`h20-p2p-2k-reg`,
  `h20-p2p-64k-tma`, `h100-p2p-sm`) and 7 to 8 % too fast on the B200: every packet of 128 bytes has the
  same header, and the B200's NVLink 5 has NVLink 4's.
- **A batch of copies saves nothing** (`ce-call-h100`): every copy has its whole start-up on the engine
  (`host.copy_startup_us`); a batch only runs copies of different pairs of memories at once. In the source
  a copy of a batch takes two thirds of a lone one.
- **`h20-p2p-128-ce`** has one digit in its source.
- **`ar-*`** are NCCL's kernels there and other ones here, with other numbers of SMs. What both share is the
  kind of link, so a near number says little of either kernel. No parameter was fitted to these rows. Bus
  bandwidth counts what a ring would send, 2 (N - 1)/N messages; with `nvls` a port carries (N + 1)/N.
"""

SPREAD_HEAD = f"""
## One SM, many SMs

How many SMs does a link need? Public answers differ by a factor of eight: 37 GB/s per SM with 1024
threads on an H20 (`h20-sm-reg`) and 43 with the TMA (`h20-sm-tma`), so eight to ten SMs; 76 SMs through
registers and 15 through the TMA (`nvlink-sms-reg`, `nvlink-sms-tma`: H100 or B200, second hand). Here
each GPU has one set of parameters, and only the engine, its threads and its bytes in flight per SM
change. *Held*: how long a byte occupies its place, which is bytes in flight over the rate (Little's law).
*SMs*: the fewest that reach {100 * SATURATED:.0f} % of what the link gives.
"""


FOLLOWS = f"""\
What the B200's two counts follow from: the parameters that move one SM's rate by more than
{100 * MOVES:.0f} %.
"""


def markdown(rows: Sequence[Sequence[object]], headers: Sequence[str], sides: str) -> str:
    """A table; ``sides``: l or r for each column."""
    align = tuple({"l": "left", "r": "right"}[side] for side in sides)
    return tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True, colalign=align)


def spread_table(found: Sequence[Spread]) -> str:
    rows = [
        [
            one.gpu,
            described(one.config).rpartition(":")[0],
            format_bytes(one.config.bytes_in_flight_per_sm),
            f"{one.gbps:.1f}",
            f"{one.held_ns:.0f}",
            one.sms,
        ]
        for one in found
    ]
    headers = ["GPU", "one SM", "in flight", "GB/s (modelled)", "held, ns", "SMs"]
    return markdown(rows, headers, "llrrrr")


def findings(found: Sequence[Spread]) -> str:
    """What follows from the spread, in sentences with its numbers."""
    known = {(one.gpu, one.config): one for one in found}
    reg, tma = known["h20", threads(1024)], known["h20", tiles(16 * KIB, 4)]
    few, many = known["b200", tiles(16 * KIB, 4)], known["b200", threads(256)]
    slow, small = known["h20", threads(128)], known["h20", tiles(2 * KIB, 8)]
    pull = known["h20", pulling(1024)]
    public_ns = reg.config.bytes_in_flight_per_sm / 37
    return f"""
**The H20 rows do not come out exactly.** 1024 threads push {reg.gbps:.1f} GB/s per SM (public 37), the
TMA {tma.gbps:.1f} (public 43). By Little's law 16 KiB in flight at 37 GB/s are held for {public_ns:.0f}
ns; the model holds them for {reg.held_ns:.0f}, the latency of an idle DRAM and little more. Both grow in
proportion until the link is full, after {reg.sms} SMs (public: 353 to 373 GB/s in all, so 9 to 10).

**15 against 76 SMs comes out on the B200, if 256 threads is what was measured**: {few.sms} SMs through
the TMA with 64 KiB in flight, {many.sms} through registers with 256 threads of one 16-byte load each. On
a link of half the rate (H20, H100) the same counts need less in flight: {small.sms} SMs with 8 tiles of 2
KiB, {slow.sms} with 128 threads. The sources name neither threads nor bytes in flight nor, for sure, the
GPU. So both counts are possible under one set of parameters; that they were measured so, nobody says.

**Why registers need more SMs.** Stores are posted, so a push by threads is bound by the load in front of
it: threads x 16 bytes every DRAM latency, more only with more registers. The TMA keeps its bytes in
flight with one thread and no register. Its bytes pass it twice, as a load and as a store that is held
until the peer has it. With two tiles of 16 KiB it idles in between: a tile is loaded, then stored, and
one request streams no faster than `tma.request_bytes_per_cycle`.

**A pull by threads holds its bytes for the link's round trip, too**: {pull.held_ns:.0f} ns instead of
{reg.held_ns:.0f}, so 1024 threads with one load each need {pull.sms} SMs instead of {reg.sms}.
"""


def shift_table(gpu: str, configs: Sequence[Config]) -> str:
    rows = []
    for config in configs:
        for shift in shifts(gpu, config):
            low, high = (f"{value:.1f}" for value in shift.gbps)
            rows.append([described(config).rpartition(":")[0], f"`{shift.path}`", low, high, shift.source])
    headers = ["one SM", "parameter", "GB/s at -20 %", "GB/s at +20 %", "source"]
    return markdown(rows, headers, "llrrl")


def rows_table(rows: Sequence[Row]) -> str:
    headers = ["row", "GPU", "run here as", "unit", "public", "modelled", "error"]
    return markdown([row.cells() for row in rows], headers, "llllrrl")


def not_compared() -> str:
    """Node rows without an error, and why."""
    small, large = (gather_us("h100", "multicast", size) for size in (MIB, 4 * MIB))
    public = 7 * MIB / 19e9 * 1e6
    return f"""
## Rows that are not compared

- **`ag-multimem-1m`, `ag-cemc-1m`, `ag-nccl-1m`** (8 H100, pytorch PR#182850): 19 GB/s of bus bandwidth
  for shards of 1 MiB are {public:.0f} us a call, and the same table has four times that bandwidth for 4
  MiB, so the same time. That is a host's time to start a collective from Python, for which no parameter
  stands here. The kernel alone takes {small:.0f} us and {large:.0f} us (`multicast`, modelled). Copies by
  an engine to a multicast address are no way of `allgather`.
- **`k-*`**: inflation of communication and compute beside each other.
- **`memcpy-d2d-h200`, `launch-floor-h200`** fixed `host.copy_device_efficiency`, `host.kernel_gap_us` and
  `host.graph_gap_us`.
- **`seed-alpha-nvlink`** (0.8 us) names no operation: here a released flag takes {flag_us("h100"):.2f} us
  one way, a copy engine {copy_us("h100", 1):.2f} us to start.
"""


def page() -> str:
    """All of docs/published.md."""
    found = [*spread("h20", (*SPREAD, *PULLS)), *spread("b200", SPREAD)]
    headline = (threads(256), tiles(16 * KIB, 4))
    return "\n".join(
        [
            HEAD,
            rows_table(ROWS),
            SOURCES.rstrip(),
            MISSES.rstrip(),
            SPREAD_HEAD,
            spread_table(found),
            findings(found),
            FOLLOWS,
            shift_table("b200", headline),
            not_compared(),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE", help="default: docs/published.md")
    options = parser.parse_args(arguments)
    options.out.write_text(page(), encoding="utf-8")
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
