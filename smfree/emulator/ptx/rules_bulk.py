"""Rules for bulk and tensor copies and what goes with them: st.async, cache policies, tensor maps."""

from __future__ import annotations

from collections.abc import Iterator

from smfree.emulator.ptx.ast import Imm, TensorAddress, Vector
from smfree.emulator.ptx.rules import Finding, Site, table
from smfree.emulator.reductions import CLUSTER_TYPES, GLOBAL_TYPES, OPERATIONS

MAX_BULK_BYTES = 1048560


def wait_group(site: Site, name: str) -> Iterator[Finding]:
    """``wait_group N``: one immediate."""
    yield from site.count(f"{name}.wait_group", [1], f"{name}.wait_group N;")
    if len(site.operands) == 1 and site.integer(0) is None:
        yield Finding(
            f"{name}.wait_group",
            f"{site.instr.name} takes an immediate, got '{site.instr.text}'; make it a compile-time constant",
        )


def bulk(site: Site, *, reduce: bool) -> Iterator[Finding]:
    """``cp{.reduce}.async.bulk`` in all forms."""
    modifiers = site.modifiers[3 if reduce else 2 :]
    first = modifiers[0] if modifiers else ""
    if first == "commit_group":
        yield from site.count("bulk.operands", [0], "cp.async.bulk.commit_group;")
    elif first == "wait_group":
        yield from wait_group(site, "cp.async.bulk")
    elif first == "prefetch":
        yield from _prefetch(site, modifiers)
    else:
        yield from _bulk_copy(site, modifiers, reduce)


def _prefetch(site: Site, modifiers: tuple[str, ...]) -> Iterator[Finding]:
    if not site.has("L2", "global"):
        yield Finding(
            "bulk.space", f"{site.instr.name} needs .L2.global: a bulk prefetch brings lines into L2"
        )
        return
    extra = int(site.has("L2::cache_hint"))
    if site.has("tensor"):
        im2col = any(m.startswith("im2col") for m in modifiers)
        form = "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [map, {x, y}];"
        yield from site.count("bulk.operands", [1 + extra + int(im2col)], form)
        yield from _tensor(site, modifiers)
    else:
        yield from site.count("bulk.operands", [2 + extra], "cp.async.bulk.prefetch.L2.global [src], size;")
        yield from _bulk_size(site, 1)
    yield from _policy(site)


def _policy(site: Site) -> Iterator[Finding]:
    place = -2 if site.has("cp_mask") else -1
    if site.has("L2::cache_hint") and len(site.operands) >= -place:
        yield from site.size("bulk.register", site.operands[place], 8, "a cache policy")


def _bulk_size(site: Site, index: int) -> Iterator[Finding]:
    if index < len(site.operands):
        yield from site.size("bulk.register", site.operands[index], 4, "the size of a bulk copy")
    size = site.integer(index)
    if size is None:
        return
    if not 0 <= size <= MAX_BULK_BYTES:
        yield Finding("bulk.size", f"a bulk copy moves 0 to {MAX_BULK_BYTES} bytes, got {size}; split it")
    elif size % 16:
        yield Finding(
            "bulk.size", f"a bulk copy moves a multiple of 16 bytes, got {size}; copy the rest by threads"
        )


def _bulk_copy(site: Site, modifiers: tuple[str, ...], reduce: bool) -> Iterator[Finding]:
    spaces = tuple(m for m in modifiers if m.split("::")[0] in ("shared", "global"))
    mechanism = [m for m in modifiers if m in ("bulk_group", "mbarrier::complete_tx::bytes")]
    to_global = spaces[:1] == ("global",)
    needed = "bulk_group" if to_global else "mbarrier::complete_tx::bytes"
    tensor = modifiers[0] == "tensor"
    allowed = {("global", "shared::cta"), ("shared::cluster", "shared::cta")}
    if not reduce:
        allowed |= {("shared::cluster", "global"), ("shared::cta", "global")}
    if spaces not in allowed:
        yield Finding(
            "bulk.space",
            f"a bulk copy goes shared::cta or shared::cluster <- global, global <- shared::cta or "
            f"shared::cluster <- shared::cta, got {' <- '.join(spaces) or 'no spaces'}",
        )
        return
    if spaces[0] != "shared::cluster" and "multicast::cluster" in modifiers:
        yield Finding(
            "bulk.space", f".multicast::cluster does not go with .{spaces[0]}; use .shared::cluster"
        )
    hints = [m for m in modifiers if m in ("multicast::cluster", "L2::cache_hint")]
    if spaces == ("shared::cluster", "shared::cta") and hints:
        yield Finding("bulk.space", f".{hints[0]} does not go with {' <- '.join(spaces)}; leave it out")
    if not mechanism:
        yield Finding("bulk.completion", f"{site.instr.name} does not say how it completes; add .{needed}")
        return
    if mechanism != [needed]:
        yield Finding(
            "bulk.completion", f".{mechanism[0]} does not go with {' <- '.join(spaces)}; use .{needed}"
        )
        return
    extra = int(site.has("L2::cache_hint")) + int(site.has("multicast::cluster")) + int(site.has("cp_mask"))
    yield from _policy(site)
    if site.has("multicast::cluster") and len(site.operands) > 1:
        mask = site.operands[-2 if site.has("L2::cache_hint") else -1]
        yield from site.size("bulk.register", mask, 2, "the CTA mask of a multicast")
    if tensor:
        im2col = any(m.startswith("im2col") and m != "im2col_no_offs" for m in modifiers)
        extra += int(im2col and not to_global)
        yield from site.count(
            "bulk.operands",
            [(2 if to_global else 3) + extra],
            "[dst], [map, {x, y}], [bar]; with one operand per hint",
        )
        yield from _tensor(site, modifiers)
        yield from _reduction(site, modifiers, reduce, None)
        return
    yield from site.count(
        "bulk.operands",
        [(3 if to_global else 4) + extra],
        "[dst], [src], size, [bar]; and one operand per hint",
    )
    yield from _bulk_size(site, 2)
    yield from _reduction(site, modifiers, reduce, GLOBAL_TYPES if to_global else CLUSTER_TYPES)


def _reduction(
    site: Site, modifiers: tuple[str, ...], reduce: bool, types: dict[str, tuple[str, ...]] | None
) -> Iterator[Finding]:
    """The operation of a reduction, and of ``types`` its type; a tensor's comes from the map (None)."""
    operations = [m for m in modifiers if m in OPERATIONS]
    if len(operations) != int(reduce):
        wanted = f"one of .{', .'.join(OPERATIONS)}" if reduce else "no operation; use cp.reduce"
        yield Finding("bulk.reduce", f"{site.instr.name} takes {wanted}")
        return
    if not reduce:
        return
    half = modifiers[-1] in ("f16", "bf16") and operations == ["add"]
    if types is not None and modifiers[-1] not in types[operations[0]]:
        yield Finding(
            "bulk.reduce",
            f"{site.instr.name}: .{operations[0]} has the types .{', .'.join(types[operations[0]])} here",
        )
    elif types is not None and half and not site.has("noftz"):
        yield Finding(
            "bulk.noftz", f"cp.reduce.async.bulk.add on .{modifiers[-1]} needs .noftz before the type"
        )
    elif site.has("noftz") and (types is None or not half):
        yield Finding("bulk.noftz", f".noftz goes with .add.f16 and .add.bf16 only, not {site.instr.name}")


def _tensor(site: Site, modifiers: tuple[str, ...]) -> Iterator[Finding]:
    dims = next((m for m in modifiers if m in ("1d", "2d", "3d", "4d", "5d")), None)
    if dims is None:
        yield Finding("tensor.dim", f"{site.instr.name} needs a dimension, .1d to .5d")
        return
    place = next((o for o in site.operands if isinstance(o, TensorAddress)), None)
    rank = int(dims[0])
    wanted = 5 if any(m in ("tile::gather4", "tile::scatter4") for m in modifiers) else rank
    if place is None:
        yield Finding("tensor.coords", f"{site.instr.name} needs [map, {{coordinates}}]; there are no braces")
    elif len(place.coords) != wanted:
        yield Finding(
            "tensor.coords",
            f".{dims} takes {wanted} coordinates, got {len(place.coords)}; innermost comes first",
        )
    for coordinate in place.coords if place is not None else ():
        yield from site.size("tensor.coords", coordinate, 4, "a coordinate")
    if "tile::gather4" in modifiers and "shared::cluster" in modifiers and not site.target.suffix:
        yield Finding(
            "ptx.target",
            f".tile::gather4 into .shared::cluster does not exist on {site.target}; compile for sm_100a "
            "or use .shared::cta",
        )


# --------------------------------------------------------------------------------------- stores to other CTAs


def _async_store(site: Site) -> Iterator[Finding]:
    """st.async and red.async to shared memory; their forms for global memory are left to ptxas."""
    if site.modifiers[:1] != ("async",) or site.has("global"):
        return
    name, kind = f"{site.instr.opcode}.async", site.modifiers[-1]
    if not site.has("mbarrier::complete_tx::bytes"):
        yield Finding(
            "async.completion", f"{name} does not say how it completes; add .mbarrier::complete_tx::bytes"
        )
        return
    if site.instr.opcode == "red":
        operations = [m for m in site.modifiers if m in OPERATIONS]
        if not site.has("relaxed", "cluster"):
            yield Finding("async.order", "red.async to shared memory is .relaxed.cluster; write both")
        # ptxas takes .add.s64, which the ISA does not list
        elif len(operations) == 1 and kind not in (
            *CLUSTER_TYPES[operations[0]],
            *_ALSO[operations[0] == "add"],
        ):
            types = ", .".join(CLUSTER_TYPES[operations[0]])
            yield Finding("async.type", f"red.async.{operations[0]} has the types .{types}, got .{kind}")
        return
    if any(m in site.modifiers for m in ("relaxed", "release")):
        yield Finding("async.order", "st.async to shared memory is weak; leave the order out")
    if kind[-2:] not in ("32", "64"):
        yield Finding("async.type", f"st.async stores 32- and 64-bit elements, got .{kind}")
    elif site.has("v4") and kind[-2:] == "64":
        yield Finding("async.type", f"st.async stores at most 16 bytes, got .v4.{kind}; use .v2")
    elif len(site.operands) > 1:
        value, lanes = site.operands[1], 2 if site.has("v2") else 4 if site.has("v4") else 1
        elems = value.elems if isinstance(value, Vector) else (value,)
        if len(elems) != lanes or isinstance(value, Vector) != (lanes > 1):
            yield Finding(
                "async.type", f"{site.instr.name} stores {lanes} elements, the operand has {len(elems)}"
            )
        for elem in elems:
            yield from site.size("async.type", elem, int(kind[-2:]) // 8, "an element")


_ALSO = {True: ("s64",), False: ()}


# -------------------------------------------------------------------------------------- cache policies


def _createpolicy(site: Site) -> Iterator[Finding]:
    kind = site.modifiers[0] if site.modifiers else ""
    levels = [m for m in site.modifiers if m.startswith("L2::evict_")]
    if kind == "cvt":
        if not site.has("L2"):
            yield Finding(
                "policy.name", "createpolicy.cvt needs .L2: createpolicy.cvt.L2.b64 policy, property;"
            )
        if len(site.operands) > 1:
            yield from site.size("policy.operands", site.operands[1], 8, "an access property")
        return
    if kind not in ("fractional", "range"):
        yield Finding("policy.name", f"createpolicy is .fractional, .range or .cvt, got {site.instr.name}")
        return
    if not levels:
        yield Finding("policy.name", f"{site.instr.name} needs a priority, as in .L2::evict_first")
    elif levels[1:] and levels[1] not in ("L2::evict_first", "L2::evict_unchanged"):
        yield Finding(
            "policy.name", f"the second priority is .L2::evict_first or ::evict_unchanged, got .{levels[1]}"
        )
    if kind == "range":
        yield from site.count(
            "policy.operands", [4], "createpolicy.range.L2::evict_last.b64 p, [a], primary, total;"
        )
        primary, total = site.integer(2), site.integer(3)
        if primary is not None and total is not None and primary > total:
            yield Finding("policy.operands", f"primary-size {primary} exceeds total-size {total}")
    elif len(site.operands) > 1 and isinstance(site.operands[1], Imm):
        fraction = float(site.operands[1].value)
        if not 0 < fraction <= 1:
            yield Finding("policy.operands", f"the fraction is above 0 and at most 1, got {fraction}")


def _prefetch_line(site: Site) -> Iterator[Finding]:
    levels = [m for m in site.modifiers if m == "tensormap" or m.split("::")[0] in ("L1", "L2")]
    if len(levels) != 1 or (site.instr.opcode == "prefetchu" and levels != ["L1"]):
        yield Finding("prefetch.level", f"{site.instr.name}: prefetch goes to .L1 or .L2, prefetchu to .L1")
    if site.has("tensormap") and any(m in site.modifiers for m in ("global", "local")):
        yield Finding("prefetch.space", "prefetch.tensormap takes a generic address, .param or .const")


# ------------------------------------------------------------------------------------------------ tensor maps

_WIDE_FIELDS = ("global_address", "global_stride")
_DIMENSION_FIELDS = ("box_dim", "global_dim", "global_stride", "element_stride")
_LARGEST = {"elemtype": 12, "interleave_layout": 2, "swizzle_mode": 3, "swizzle_atomicity": 3, "fill_mode": 1}


def _tensormap(site: Site) -> Iterator[Finding]:
    first = site.modifiers[0] if site.modifiers else ""
    if first == "cp_fenceproxy":
        yield from _publish(site)
        return
    fields = [m for m in site.modifiers if m in (*_LARGEST, *_WIDE_FIELDS, *_DIMENSION_FIELDS, "rank")]
    if first != "replace" or len(fields) != 1 or not site.has("tile", "b1024"):
        yield Finding(
            "tensormap.name",
            f"{site.instr.name} does not exist; write tensormap.replace.tile.FIELD.b1024.TYPE",
        )
        return
    field, kind = fields[0], site.modifiers[-1]
    if site.has("shared"):
        yield Finding("tensormap.space", "tensormap.replace works on .global or .shared::cta, got .shared")
    if kind != ("b64" if field in _WIDE_FIELDS else "b32"):
        yield Finding("tensormap.type", f".{field} takes .{'b64' if kind == 'b32' else 'b32'}, got .{kind}")
    indexed = field in _DIMENSION_FIELDS
    yield from site.count(
        "tensormap.operands", [2 + int(indexed)], "[map], value; with the dimension between"
    )
    if indexed and len(site.operands) == 3:
        ordinal = site.integer(1)
        if ordinal is None or not 0 <= ordinal <= 4:
            yield Finding("tensormap.operands", f"the dimension of .{field} is an immediate 0 to 4")
    if field in _LARGEST:
        most = _LARGEST[field]
        if field == "elemtype" and site.target.number >= 100:
            most = 15
        elif field == "swizzle_mode" and site.target.number == 103:
            most = 4
        value = site.integer(1)
        if value is None or not 0 <= value <= most:
            yield Finding("tensormap.operands", f"the value of .{field} is an immediate 0 to {most}")


def _publish(site: Site) -> Iterator[Finding]:
    form = (
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
        " [dst], [src], 128;"
    )
    parts = ("global", "shared::cta", "tensormap::generic", "release", "sync", "aligned")
    if not site.has(*parts) or not any(m in site.modifiers for m in ("cta", "cluster", "gpu", "sys")):
        yield Finding("tensormap.name", f"{site.instr.name} lacks a part; write {form}")
    elif len(site.operands) != 3 or site.integer(2) != 128:
        yield Finding("tensormap.operands", f"a tensor map has 128 bytes; write {form}")


RULES = table(
    ("st red", _async_store), ("createpolicy", _createpolicy), ("prefetch prefetchu", _prefetch_line),
    ("tensormap", _tensormap),
)  # fmt: skip
