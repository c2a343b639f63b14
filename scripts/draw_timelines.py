"""Run kernels on emulated GPUs and draw what they did: the pictures of docs/img. ``make docs`` calls it.

    python scripts/draw_timelines.py                        # all pictures, into docs/img
    python scripts/draw_timelines.py --only ring --out .    # one of them, elsewhere
    python scripts/draw_timelines.py --traces traces        # keep the traces, for `smfree timeline`

All times in the pictures are modelled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the script runs from anywhere, with nothing installed

from kernels.common import launch  # noqa: E402
from kernels.lsu.copy_async import AsyncCopyConfig  # noqa: E402
from kernels.mbarrier.registry import PIPELINES  # noqa: E402
from kernels.tma.bulk import BulkConfig  # noqa: E402
from smfree.cuda import Device  # noqa: E402
from smfree.timeline.lanes import timeline  # noqa: E402
from smfree.timeline.svg import draw  # noqa: E402

FOLDER = ROOT / "docs" / "img"
TILE_BYTES = 4096


@dataclass(frozen=True)
class Picture:
    """Launches of kernels on one device, each with its label, drawn above each other on one scale."""

    title: str
    device: str
    runs: Mapping[str, Callable[[Device], None]]


def copying(config: AsyncCopyConfig | BulkConfig, tiles: int) -> Callable[[Device], None]:
    """One CTA that copies so many tiles."""

    def run(device: Device) -> None:
        src = device.asarray(np.arange(tiles * config.tile_bytes // 4, dtype=np.uint32))
        dst = device.empty(src.shape, src.dtype)
        args = (dst, src, np.uint64(src.nbytes))
        launch(
            config.source, 1, config.threads, args,
            device_array=src, shared_bytes=config.shared_bytes, stream=None,
        )  # fmt: skip
        assert (dst.numpy() == src.numpy()).all()

    return run


def streaming(name: str, num_stages: int, *, work: int, tiles: int) -> Callable[[Device], None]:
    """One CTA of a pipeline that takes so many tiles."""
    pipeline = PIPELINES[name]
    config = pipeline.config(TILE_BYTES, num_stages, work=work, max_ctas=1)

    def run(device: Device) -> None:
        x = np.arange(tiles * TILE_BYTES // 4, dtype=np.float32) % 64
        y = np.ones_like(x)
        dst = device.empty(x.shape, x.dtype)
        pipeline.run(dst, device.asarray(x), device.asarray(y), alpha=2.0, config=config)
        assert (dst.numpy() == y + 2.0 * work * x).all()

    return run


PICTURES: Mapping[str, Picture] = {
    "lsu_async": Picture(
        "cp.async: global to shared, back through registers",
        "emu:a100",
        {
            f"kernels/lsu/copy_async.cu, {n} stage{'s' if n > 1 else ''}": copying(
                AsyncCopyConfig(tile_bytes=TILE_BYTES, num_stages=n), tiles=8
            )
            for n in (1, 3)
        },
    ),
    "tma_bulk": Picture(
        "The TMA copies, one thread asks",
        "emu:h100",
        {
            f"kernels/tma/bulk.cu, {n} stage{'s' if n > 1 else ''}": copying(
                BulkConfig(tile_bytes=TILE_BYTES, num_stages=n), tiles=8
            )
            for n in (1, 3)
        },
    ),
    "pingpong": Picture(
        "One buffer against two",
        "emu:h100",
        {
            f"kernels/mbarrier/pingpong.cu, {n} stage{'s' if n > 1 else ''}": streaming(
                "pingpong", n, work=12, tiles=6
            )
            for n in (1, 2)
        },
    ),
    "ring": Picture(
        "A warp moves, four compute",
        "emu:h100",
        {
            "kernels/mbarrier/ring.cu, 1 stage": streaming("ring", 1, work=12, tiles=8),
            "kernels/mbarrier/ring.cu, 3 stages": streaming("ring", 3, work=12, tiles=8),
        },
    ),
    "ring_async": Picture(
        "The ring without a TMA",
        "emu:a100",
        {
            "kernels/mbarrier/ring_async.cu, 1 stage": streaming("ring_async", 1, work=12, tiles=8),
            "kernels/mbarrier/ring_async.cu, 3 stages": streaming("ring_async", 3, work=12, tiles=8),
        },
    ),
    "specialised": Picture(
        "Warpgroups with roles: one copies, two compute",
        "emu:h100",
        {
            f"kernels/mbarrier/specialised.cu, {n} stages": streaming("specialised", n, work=32, tiles=8)
            for n in (2, 4)
        },
    ),
}


def drawn(picture: Picture, traces: Path | None = None) -> str:
    """Run a picture's kernels and draw them as SVG; ``traces``: where the trace is kept."""
    with Device.open(picture.device) as device, device.trace() as trace:
        for label, run in picture.runs.items():
            run(device)
            device.synchronize()
            trace.launches[-1].label = label
    if traces is not None:
        trace.save(traces)
    return draw(timeline(trace.as_dict()), title=picture.title)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pictures; default: docs/img")
    parser.add_argument("--only", choices=sorted(PICTURES), help="one picture")
    parser.add_argument("--traces", type=Path, help="folder for the traces, too")
    given = parser.parse_args(arguments)
    for folder in filter(None, (given.out, given.traces)):
        folder.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        if given.only not in (None, name):
            continue
        kept = None if given.traces is None else given.traces / f"{name}.json"
        target = given.out / f"{name}.svg"
        target.write_text(drawn(picture, kept), encoding="utf-8")
        print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
