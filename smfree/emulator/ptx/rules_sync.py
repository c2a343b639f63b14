"""Rules for barriers, fences, register reallocation, and plain loads and stores."""

from __future__ import annotations

from collections.abc import Iterator

from smfree.emulator.ptx.ast import Address, Pair, Sink, Vector
from smfree.emulator.ptx.declarations import TYPE_BYTES
from smfree.emulator.ptx.rules import Finding, Site, table
from smfree.emulator.ptx.setmaxnreg import entry_registers, increases

_SCOPES = ("cta", "cluster", "gpu", "sys")
_ACCESS_ORDERS = {"ld": ("acquire", "relaxed"), "st": ("release", "relaxed")}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


def _barrier(site: Site) -> Iterator[Finding]:
    modifiers = [m for m in site.modifiers if m != "cta"]
    operation = modifiers[0] if modifiers else ""
    if operation == "cluster":
        yield from _cluster_barrier(site, modifiers[1:])
        return
    if operation == "warp":
        yield from site.count("bar.operands", [1], "bar.warp.sync 0xffffffff;")
        return
    if operation not in ("sync", "arrive", "red"):
        yield Finding("bar.name", f"no instruction is called {site.instr.name}; it is .sync, .arrive or .red")
        return
    allowed = {"sync": [1, 2], "arrive": [2], "red": [3, 4]}[operation]
    form = {
        "sync": "bar.sync id; or bar.sync id, threads;",
        "arrive": "bar.arrive id, threads;",
        "red": "bar.red.popc.u32 d, id, p;",
    }[operation]
    yield from site.count("bar.operands", allowed, form)
    first = 1 if operation == "red" else 0
    number = site.integer(first)
    if number is not None and not 0 <= number <= 15:
        yield Finding("bar.id", f"a CTA has barriers 0 to 15, got {number}; share one or use an mbarrier")
    if len(site.operands) > first + (2 if operation == "red" else 1):
        threads = site.integer(first + 1)
        if threads is not None and threads % 32:
            yield Finding("bar.threads", f"the thread count of a barrier is a multiple of 32, got {threads}")
        if threads == 0 and operation == "arrive":
            yield Finding("bar.threads", "bar.arrive needs the number of threads that meet, got 0")
    if operation == "red" and site.modifiers[-1] == "pred" and not (site.has("and") or site.has("or")):
        yield Finding("bar.name", f"{site.instr.name}: a predicate is reduced by .and or .or")
    if operation == "red" and site.modifiers[-1] != "pred" and not site.has("popc"):
        yield Finding("bar.name", f"{site.instr.name}: .and and .or answer in a .pred, .popc in a .u32")


def _cluster_barrier(site: Site, modifiers: list[str]) -> Iterator[Finding]:
    operation = modifiers[0] if modifiers else ""
    if operation not in ("arrive", "wait"):
        yield Finding("bar.name", f"no instruction is called {site.instr.name}; it is .arrive, then .wait")
        return
    allowed = ("release", "relaxed", "aligned") if operation == "arrive" else ("acquire", "aligned")
    for modifier in modifiers[1:]:
        if modifier not in allowed:
            yield Finding("bar.order", f"barrier.cluster.{operation} cannot be .{modifier}; leave it out")
    yield from site.count("bar.operands", [0], f"barrier.cluster.{operation};")


def _fence(site: Site) -> Iterator[Finding]:
    modifiers = site.modifiers
    first = modifiers[0] if modifiers else ""
    if first == "proxy":
        yield from _proxy_fence(site)
    elif first == "mbarrier_init":
        if modifiers != ("mbarrier_init", "release", "cluster"):
            yield Finding(
                "fence.scope", f"{site.instr.name} does not exist; write fence.mbarrier_init.release.cluster"
            )
    elif not any(m in _SCOPES for m in modifiers):
        yield Finding("fence.scope", f"{site.instr.name} needs a scope: .cta, .cluster, .gpu or .sys")
    else:
        yield from _restricted(site, modifiers)


def _restricted(site: Site, modifiers: tuple[str, ...]) -> Iterator[Finding]:
    """``.sync_restrict`` exists in four forms: release of shared::cta, acquire of shared::cluster."""
    restricted = any(m.startswith("sync_restrict") for m in modifiers)
    if restricted and modifiers[-3:] not in (
        ("acquire", "sync_restrict::shared::cluster", "cluster"),
        ("release", "sync_restrict::shared::cta", "cluster"),
    ):
        yield Finding(
            "fence.scope",
            f"{site.instr.name} does not exist; write .release.sync_restrict::shared::cta.cluster or "
            ".acquire.sync_restrict::shared::cluster.cluster",
        )


def _proxy_fence(site: Site) -> Iterator[Finding]:
    kind = site.modifiers[1] if len(site.modifiers) > 1 else ""
    if kind == "async":
        space = site.modifiers[2:]
        if space and space[0] not in ("global", "shared::cta", "shared::cluster"):
            yield Finding(
                "fence.space",
                f"fence.proxy.async takes .global, .shared::cta or .shared::cluster, got .{space[0]}",
            )
    elif kind == "tensormap::generic" and site.has("release"):
        yield from site.count("fence.operands", [0], "fence.proxy.tensormap::generic.release.gpu;")
    elif kind == "tensormap::generic" and not site.has("acquire") and not site.has("acq_rel"):
        yield Finding("fence.order", f"{site.instr.name} needs .release or .acquire before the scope")
    elif kind == "tensormap::generic" and site.has("acquire"):
        yield from site.count("fence.operands", [2], "fence.proxy.tensormap::generic.acquire.gpu [map], 128;")
        size = site.integer(1)
        if size is not None and size != 128:
            yield Finding("fence.size", f"a tensor map has 128 bytes, got {size}")
    elif kind == "async::generic":
        yield from _restricted(site, site.modifiers)
    elif kind not in ("alias", "tensormap::generic"):
        yield Finding(
            "fence.name", f"no proxy is called '{kind}'; it is .async, .alias or .tensormap::generic"
        )


def _membar(site: Site) -> Iterator[Finding]:
    if site.modifiers[:1] not in (("cta",), ("gl",), ("sys",), ("proxy",)):
        yield Finding("fence.scope", f"{site.instr.name} does not exist; membar takes .cta, .gl or .sys")


def _setmaxnreg(site: Site) -> Iterator[Finding]:
    for modifier in ("sync", "aligned"):
        if not site.has(modifier):
            yield Finding(
                "setmaxnreg.name", f"{site.instr.name} needs .{modifier}: setmaxnreg.inc.sync.aligned.u32 n;"
            )
    yield from site.count("setmaxnreg.count", [1], "setmaxnreg.inc.sync.aligned.u32 n;")
    count = site.integer(0)
    if count is None:
        yield Finding(
            "setmaxnreg.count", "setmaxnreg takes an immediate; make the count a compile-time constant"
        )
    elif not 24 <= count <= 256:
        yield Finding("setmaxnreg.count", f"setmaxnreg takes 24 to 256 registers, got {count}")
    elif count % 8:
        yield Finding(
            "setmaxnreg.count", f"setmaxnreg takes a multiple of 8, got {count}; use {count // 8 * 8}"
        )
    elif site.has("dec"):
        most = max(increases(site.function), default=entry_registers(site.function) or count)
        if count > most:
            yield Finding(
                "setmaxnreg.dec",
                f"setmaxnreg.dec to {count} registers, but no warp ever owns more than {most}",
            )


def _elect(site: Site) -> Iterator[Finding]:
    if site.operands and not isinstance(site.operands[0], Pair):
        yield Finding("elect.predicate", "elect.sync answers in a predicate; write elect.sync _|p, mask;")


# ------------------------------------------------------------------------------------------ loads and stores


def _access(site: Site) -> Iterator[Finding]:
    if site.modifiers[:1] in (("async",), ("bulk",)):
        return
    opcode = site.instr.opcode
    unit = TYPE_BYTES.get(site.modifiers[-1] if site.modifiers else "")
    if unit is None:
        yield Finding("access.type", f"{site.instr.name} needs a type at its end, such as .b32")
        return
    yield from _access_order(site)
    hint = int(site.has("L2::cache_hint"))
    yield from site.count("access.operands", [2 + hint], f"{opcode} with a value and an [address]")
    if len(site.operands) < 2:
        return
    value, place = site.operands[:2] if opcode == "ld" else site.operands[1::-1]
    if not isinstance(place, Address):
        yield Finding("access.operands", f"{opcode} needs an address in brackets; got '{site.instr.text}'")
        return
    if opcode == "st" and site.has("const"):
        yield Finding("access.space", "constant memory cannot be written by a kernel; use .global")
    base = site.register_type(place.base) if place.base is not None else None
    window = any(m.split("::")[0] in ("shared", "local", "const", "param") for m in site.modifiers)
    if not window and base is not None and TYPE_BYTES.get(base, 0) < 8:
        yield Finding(
            "access.address", f"a global or generic address has 64 bits, the base register is .{base}"
        )
    lanes = next((_VECTORS[m] for m in site.modifiers if m in _VECTORS), 1)
    elems = value.elems if isinstance(value, Vector) else (value,)
    if len(elems) != lanes:
        yield Finding(
            "access.vector", f"{site.instr.name} moves {lanes} elements, the operand has {len(elems)}"
        )
        return
    yield from _access_width(site, lanes, unit)
    for elem in elems:
        if lanes == 1 and isinstance(elem, Sink):
            yield Finding("access.operands", f"{site.instr.name} cannot throw its result away; drop the load")
        kind = site.register_type(elem)
        if kind is not None and TYPE_BYTES.get(kind, 0) < unit:
            yield Finding(
                "access.register",
                f"a .{kind} register is too small for .{site.modifiers[-1]}; declare it wider",
            )


def _access_width(site: Site, lanes: int, unit: int) -> Iterator[Finding]:
    width = lanes * unit
    if width == 32 and unit >= 4:
        if site.target.number < 100:
            yield Finding(
                "ptx.target", f"32-byte accesses need sm_100, the target is {site.target}; use .v4.b32"
            )
        elif any(m.split("::")[0] in ("shared", "local", "const", "param") for m in site.modifiers):
            yield Finding("access.vector", "32-byte accesses exist for global memory only; use 16 bytes")
    elif width > 16 or lanes == 8:
        yield Finding("access.vector", f"{site.instr.name} would move {width} bytes at once; the limit is 16")


def _access_order(site: Site) -> Iterator[Finding]:
    orders = [m for m in site.modifiers if m in ("acquire", "release", "relaxed")]
    for order in orders:
        if order not in _ACCESS_ORDERS[site.instr.opcode]:
            yield Finding("access.order", f"{site.instr.opcode} cannot be .{order}")
        elif not any(m in _SCOPES for m in site.modifiers):
            yield Finding("access.order", f".{order} needs a scope: .cta, .cluster, .gpu or .sys")


RULES = table(
    ("bar barrier", _barrier),
    ("fence", _fence),
    ("membar", _membar),
    ("setmaxnreg", _setmaxnreg),
    ("elect", _elect),
    ("ld st", _access),
)
