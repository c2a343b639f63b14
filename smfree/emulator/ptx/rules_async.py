"""Rules for cp.async and its groups, and for mbarrier; those of bulk copies are in rules_bulk."""

from __future__ import annotations

from collections.abc import Iterator

from smfree.emulator.ptx.ast import Address, Reg, Vector
from smfree.emulator.ptx.rules import Finding, Site, table
from smfree.emulator.ptx.rules_bulk import bulk, wait_group

MAX_ARRIVALS = (1 << 20) - 1
_MBARRIER_OPERATIONS = (
    "init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait",
    "pending_count",
)  # fmt: skip
_REMOTE = ("arrive", "arrive_drop", "expect_tx", "complete_tx")
_ORDERS = ("release", "acquire", "relaxed")
_SCOPES = ("cta", "cluster", "gpu", "sys")


# ------------------------------------------------------------------------------------------------------ cp


def _cp(site: Site) -> Iterator[Finding]:
    second = site.modifiers[1] if len(site.modifiers) > 1 else ""
    if site.modifiers[:1] == ("async",):
        if second == "bulk":
            yield from bulk(site, reduce=False)
        elif second in ("commit_group", "wait_all"):
            yield from site.count("cp.async.operands", [0], f"cp.async.{second};")
        elif second == "wait_group":
            yield from wait_group(site, "cp.async")
            if site.has("read"):
                yield Finding(
                    "cp.async.wait_group", ".read goes with cp.async.bulk.wait_group only; leave it out"
                )
        elif second == "mbarrier":
            yield from _copy_arrive(site)
        else:
            yield from _copy(site)
    elif site.modifiers[:3] == ("reduce", "async", "bulk"):
        yield from bulk(site, reduce=True)
    else:
        yield Finding(
            "cp.name", f"no instruction is called {site.instr.name}; it is cp.async or cp.reduce.async.bulk"
        )


def _copy_arrive(site: Site) -> Iterator[Finding]:
    yield from site.count("cp.async.operands", [1], "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [bar];")
    if site.modifiers[-1:] != ("b64",):
        yield Finding("mbarrier.type", f"{site.instr.name} needs the type .b64 at its end")
    if site.has("shared::cluster"):
        yield Finding(
            "mbarrier.space",
            "cp.async.mbarrier.arrive works on a barrier of its own CTA; use .shared::cta",
        )


def _copy(site: Site) -> Iterator[Finding]:
    cache = [m for m in site.modifiers if m in ("ca", "cg")]
    if len(cache) != 1:
        yield Finding(
            "cp.async.cache", f"{site.instr.name} needs .ca or .cg; write cp.async.cg for 16-byte copies"
        )
    spaces = [m for m in site.modifiers if m.split("::")[0] in ("shared", "global")]
    if len(spaces) != 2 or spaces[0] not in ("shared", "shared::cta") or spaces[1] != "global":
        yield Finding(
            "cp.async.space",
            f"cp.async goes from .global to .shared::cta, got {'.'.join(spaces) or 'no spaces'}",
        )
    hint = int(site.has("L2::cache_hint"))
    yield from site.count(
        "cp.async.operands", [3 + hint, 4 + hint], "cp.async.ca.shared.global [dst], [src], 16;"
    )
    if len(site.operands) < 3:
        return
    size = site.integer(2)
    if size is None:
        yield Finding(
            "cp.async.size", "the size of cp.async must be an immediate; use src-size for a varying length"
        )
        return
    if size not in (4, 8, 16):
        yield Finding("cp.async.size", f"cp.async copies 4, 8 or 16 bytes, got {size}; split or pad the copy")
    elif cache == ["cg"] and size != 16:
        yield Finding("cp.async.size", f"cp.async.cg copies 16 bytes, got {size}; use .ca for 4 and 8")
    source = site.integer(3) if len(site.operands) > 3 + hint else None
    if len(site.operands) > 3 + hint and site.register_type(site.operands[3]) != "pred":
        yield from site.size("cp.async.src_size", site.operands[3], 4, "src-size")
    if source is not None and not 0 <= source <= size:
        yield Finding("cp.async.src_size", f"src-size must be 0 to cp-size ({size}), got {source}")


# ------------------------------------------------------------------------------------------------ mbarrier


def _mbarrier(site: Site) -> Iterator[Finding]:
    operation = site.modifiers[0] if site.modifiers else ""
    if operation not in _MBARRIER_OPERATIONS:
        yield Finding(
            "mbarrier.name",
            f"no instruction is called {site.instr.name}; after mbarrier comes one of "
            f"{', '.join(_MBARRIER_OPERATIONS)}",
        )
        return
    if site.modifiers[-1] != "b64":
        yield Finding("mbarrier.type", f"{site.instr.name} needs the type .b64 at its end")
    yield from _mbarrier_space(site, operation)
    yield from _mbarrier_order(site, operation)
    if operation == "init":
        yield from site.count("mbarrier.operands", [2], "mbarrier.init.shared::cta.b64 [bar], count;")
        count = site.integer(1)
        if count is not None and not 1 <= count <= MAX_ARRIVALS:
            yield Finding("mbarrier.count", f"the arrival count is 1 to {MAX_ARRIVALS}, got {count}")
    elif operation == "inval":
        yield from site.count("mbarrier.operands", [1], "mbarrier.inval.shared::cta.b64 [bar];")
    elif operation in ("arrive", "arrive_drop"):
        yield from _arrive(site, operation)
    elif operation in ("expect_tx", "complete_tx"):
        yield from site.count(
            "mbarrier.operands", [2], f"mbarrier.{operation}.relaxed.cta.shared::cta.b64 [bar], n;"
        )
    elif operation == "pending_count":
        yield from site.count("mbarrier.operands", [2], "mbarrier.pending_count.b64 count, state;")
    else:
        yield from _wait(site, operation)


def _mbarrier_space(site: Site, operation: str) -> Iterator[Finding]:
    for modifier in site.modifiers:
        if modifier in ("global", "local", "const", "param"):
            yield Finding("mbarrier.space", f"an mbarrier lives in shared memory, got .{modifier}")
        elif modifier == "shared::cluster" and operation not in _REMOTE:
            yield Finding(
                "mbarrier.space",
                f"mbarrier.{operation} works on a barrier of its own CTA; use .shared::cta",
            )


def _mbarrier_order(site: Site, operation: str) -> Iterator[Finding]:
    orders = [m for m in site.modifiers if m in _ORDERS]
    scopes = [m for m in site.modifiers if m in _SCOPES]
    allowed = {
        "arrive": ("release", "relaxed"),
        "arrive_drop": ("release", "relaxed"),
        "expect_tx": ("relaxed",),
        "complete_tx": ("relaxed",),
        "test_wait": ("acquire", "relaxed"),
        "try_wait": ("acquire", "relaxed"),
    }.get(operation, ())
    for order in orders:
        if order not in allowed:
            yield Finding(
                "mbarrier.order", f"mbarrier.{operation} cannot be .{order}; use {_either(allowed)}"
            )
    for scope in scopes:
        if scope not in ("cta", "cluster"):
            yield Finding(
                "mbarrier.order", f"an mbarrier orders .cta or .cluster, got .{scope}; use .cluster"
            )
    if bool(orders) != bool(scopes):
        yield Finding(
            "mbarrier.order",
            f"{site.instr.name}: order and scope come together, as in .release.cta, or not at all",
        )


def _either(modifiers: tuple[str, ...]) -> str:
    return " or ".join(f".{m}" for m in modifiers) or "none"


def _arrive(site: Site, operation: str) -> Iterator[Finding]:
    expects = site.has("expect_tx")
    no_complete = site.has("noComplete")
    infix, tail = (".expect_tx", ", n") if expects else ("", "")
    form = f"mbarrier.{operation}{infix}.shared::cta.b64 _, [bar]{tail};"
    if expects and site.modifiers[1] != "expect_tx":
        yield Finding(
            "mbarrier.name", f".expect_tx comes right after {operation}; write mbarrier.{operation}.expect_tx"
        )
    if expects and no_complete:
        yield Finding("mbarrier.name", ".noComplete does not go with .expect_tx; leave it out")
    for other in ("relaxed", "cluster", "shared::cluster"):
        if no_complete and site.has(other):
            yield Finding("mbarrier.name", f".noComplete does not go with .{other}; leave one of them out")
    if site.operands and isinstance(site.operands[0], Address):
        yield Finding(
            "mbarrier.sink", f"{site.instr.name} has no destination; write a register or '_' first: {form}"
        )
        return
    needs_count = expects or no_complete
    yield from site.count("mbarrier.operands", [3] if needs_count else [2, 3], form)
    if site.has("shared::cluster") and not site.is_sink(0):
        yield Finding(
            "mbarrier.sink", f"a remote {operation} returns no state; write '_' as destination: {form}"
        )
    count = site.integer(2)
    if not expects:
        if count == 0:
            yield Finding("mbarrier.count", f"mbarrier.{operation} needs a count of at least 1, got 0")
        if len(site.operands) == 3 and not no_complete and site.target.number < 90:
            yield Finding(
                "ptx.target",
                f"mbarrier.{operation} with a count needs sm_90, the target is {site.target}; use "
                ".noComplete or arrive once per thread",
            )


def _wait(site: Site, operation: str) -> Iterator[Finding]:
    parity = site.has("parity")
    infix, kind = (".parity", "parity") if parity else ("", "state")
    form = f"mbarrier.{operation}{infix}.shared::cta.b64 p, [bar], {kind};"
    if parity and site.modifiers[1] != "parity":
        yield Finding(
            "mbarrier.name", f".parity comes right after {operation}; write mbarrier.{operation}.parity"
        )
    yield from site.count("mbarrier.operands", [3, 4] if operation == "try_wait" else [3], form)
    if site.is_sink(0) or (site.operands and site.register_type(site.operands[0]) != "pred"):
        yield Finding(
            "mbarrier.predicate", f"{site.instr.name} answers in a predicate register; write {form}"
        )
    if len(site.operands) < 3:
        return
    value = site.integer(2)
    if parity and value is not None and value not in (0, 1):
        yield Finding("mbarrier.parity", f"the parity operand is 0 or 1, got {value}; pass phase & 1")
    operand = site.operands[2]
    size = site.register_type(operand)
    if isinstance(operand, Reg) and size is not None and size.endswith("64") == parity:
        wanted = "32-bit parity" if parity else "64-bit state"
        yield Finding("mbarrier.operands", f"{site.instr.name} takes a {wanted}, {operand.name} is .{size}")
    if isinstance(operand, Vector):
        yield Finding("mbarrier.operands", f"{site.instr.name} takes one value, not a vector")


RULES = table(("cp", _cp), ("mbarrier", _mbarrier))
