"""A small trace made by hand: one producer warp, two consumer warps, one stage."""

from __future__ import annotations

from typing import Any


def wait(warp: int, on: str, phase: int | None, start: float, end: float) -> dict[str, Any]:
    return {"cta": 0, "warp": warp, "on": on, "phase": phase, "start": start, "end": end, "at": "ring.cu:1"}


def copy(kind: str, start: float, end: float, **changes: Any) -> dict[str, Any]:
    row = {"cta": 0, "warp": 0, "kind": kind, "num_bytes": 1024, "into": 0, "shared": 128, "group": None}
    row |= {"barrier": "full[0]" if kind.endswith("load") else None, "start": start, "read": end, "end": end}
    return row | {"at": "ring.cu:2"} | changes


def launch(**changes: Any) -> dict[str, Any]:
    """Two tiles: in at 10 to 60 and 110 to 160, worked on from 70 to 90 and 170 to 190."""
    consumer = [("full[0]", 0, 5, 70), ("full[0]", 1, 90, 170)]
    row: dict[str, Any] = {
        "kernel": "ring",
        "device": "A GPU (emulated)",
        "sm_clock_mhz": 1000.0,
        "grid": [2, 1, 1],
        "block": [96, 1, 1],
        "shared_bytes": 4096,
        "cycles": 220.0,
        "label": "",
        "clock": "modelled",
        "warps": [{"cta": 0, "warp": w, "start": 0.0, "end": 200.0} for w in range(3)],
        "waits": [
            wait(0, "empty[0]", 0, 20, 100),
            *[wait(w, *each) for w in (1, 2) for each in consumer],
        ],
        "copies": [
            copy("cp.async.bulk load", 10, 55),
            copy("cp.async.bulk load", 12, 60, shared=1152),
            copy("cp.async.bulk load", 110, 160),
            copy("cp.async.bulk store", 90, 130, read=105, shared=1152, warp=1),
        ],
        "phases": [
            {"cta": 0, "barrier": "full[0]", "phase": 0, "time": 60.0},
            {"cta": 0, "barrier": "empty[0]", "phase": 0, "time": 95.0},
            {"cta": 0, "barrier": "full[0]", "phase": 1, "time": 160.0},
        ],
    }
    return row | changes


def trace(*launches: dict[str, Any]) -> dict[str, Any]:
    return {"smfree_trace": 1, "launches": list(launches or [launch()])}
