"""What ptxas would refuse, found before a kernel runs.

The emulator takes PTX text where a GPU takes what ptxas made of it, so whatever ptxas refuses must be
refused here too: wrong immediates, missing operands, instructions the target does not have. :func:`load`
is the way in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from smfree.emulator.errors import PtxError
from smfree.emulator.ptx import (
    rules_alu,
    rules_async,
    rules_bulk,
    rules_half,
    rules_matrix,
    rules_multimem,
    rules_sync,
)
from smfree.emulator.ptx.ast import Function, Kernel, Module, Special
from smfree.emulator.ptx.parser import parse
from smfree.emulator.ptx.rules import Finding, Site, Target

MAX_STATIC_SHARED_BYTES = 48 * 1024
MAX_PARAMETER_BYTES = 32764


@dataclass(frozen=True, slots=True)
class _Needs:
    """An instruction (``opcode`` with all of ``modifiers``) and where it exists.

    ``only`` lists the architectures that have it as ``a`` or ``f`` feature; then ``least`` does not matter.
    """

    opcode: str
    modifiers: tuple[str, ...] = ()
    least: int = 0
    only: tuple[int, ...] = ()
    remedy: str = ""


_BLACKWELL = (100, 101, 103, 110)
_NEEDS = (
    _Needs("mbarrier", (), 80, remedy="use bar.sync"),
    _Needs("mbarrier", ("try_wait",), 90, remedy="poll with mbarrier.test_wait"),
    _Needs("mbarrier", ("expect_tx",), 90, remedy="only bulk copies need it, and they need sm_90 too"),
    _Needs("mbarrier", ("complete_tx",), 90),
    _Needs("cp", (), 80, remedy="load to registers and store to shared memory"),
    _Needs("cp", ("async", "bulk"), 90, remedy="use cp.async"),
    _Needs("cp", ("reduce",), 90, remedy="use red"),
    _Needs("cp", ("cp_mask",), 100),
    _Needs("cp", ("tile::gather4",), 100),
    _Needs("cp", ("tile::scatter4",), 100),
    _Needs("cp", ("cta_group::1",), only=_BLACKWELL),
    _Needs("cp", ("cta_group::2",), only=_BLACKWELL),
    _Needs("barrier", ("cluster",), 90, remedy="there are no clusters below sm_90"),
    _Needs("fence", ("proxy", "async"), 90),
    _Needs("fence", ("proxy", "async::generic"), 90),
    _Needs("fence", ("proxy", "tensormap::generic"), 90),
    _Needs("fence", ("mbarrier_init",), 90, remedy="bar.sync makes the initialisation visible inside a CTA"),
    _Needs("fence", ("acquire",), 90, remedy="use fence.acq_rel"),
    _Needs("fence", ("release",), 90, remedy="use fence.acq_rel"),
    _Needs("fence", ("cluster",), 90),
    _Needs("elect", (), 90, remedy="compare %laneid with a constant"),
    _Needs("mapa", (), 90),
    _Needs("getctarank", (), 90),
    _Needs("griddepcontrol", (), 90),
    _Needs("prefetch", ("tensormap",), 90),
    _Needs("st", ("async",), 90),
    _Needs("red", ("async",), 90),
    _Needs("multimem", (), 90),
    _Needs("stmatrix", (), 90, remedy="use st.shared"),
    _Needs("ldmatrix", (), 75, remedy="use ld.shared"),
    _Needs("movmatrix", (), 75),
    _Needs("tensormap", ("cp_fenceproxy",), 90),
    _Needs("tensormap", ("replace",), only=(90, *_BLACKWELL, 120, 121)),
    _Needs("tensormap", ("swizzle_atomicity",), 100),
    _Needs("setmaxnreg", (), only=(90, *_BLACKWELL, 120, 121)),
    _Needs("wgmma", (), only=(90,), remedy="use mma.sync"),
    _Needs("tcgen05", (), only=_BLACKWELL, remedy="use mma.sync"),
    _Needs("clusterlaunchcontrol", (), 100),
    _Needs("redux", (), 80, remedy="use shfl.sync"),
    _Needs("createpolicy", (), 80),
    _Needs("discard", (), 80),
    _Needs("applypriority", (), 80),
)
_NEEDS_BY_OPCODE = {n.opcode: tuple(m for m in _NEEDS if m.opcode == n.opcode) for n in _NEEDS}
_TABLES = tuple(
    rules.RULES
    for rules in (rules_async, rules_bulk, rules_sync, rules_alu, rules_half, rules_matrix, rules_multimem)
)
_CLUSTER_SCOPED = frozenset({"ld", "st", "atom", "red"})


def _target_rules(site: Site) -> Iterator[Finding]:
    target, modifiers = site.target, site.modifiers
    for needs in _NEEDS_BY_OPCODE.get(site.instr.opcode, ()):
        if not all(m in modifiers for m in needs.modifiers):
            continue
        name = ".".join((needs.opcode, *needs.modifiers))
        hint = f"; {needs.remedy}" if needs.remedy else ""
        if needs.only:
            if not target.suffix or target.number not in needs.only:
                homes = ", ".join(f"sm_{n}a" for n in needs.only)
                yield Finding("ptx.target", f"{name} exists on {homes}, the target is {target}{hint}")
        elif target.number < needs.least:
            yield Finding("ptx.target", f"{name} needs sm_{needs.least}, the target is {target}{hint}")
    if target.number >= 90:
        return
    if "shared::cluster" in modifiers:
        yield Finding("ptx.target", f".shared::cluster needs sm_90, the target is {target}; use .shared::cta")
    elif "cluster" in modifiers and site.instr.opcode in _CLUSTER_SCOPED:
        yield Finding(
            "ptx.target", f"the scope .cluster needs sm_90, the target is {target}; use .cta or .gpu"
        )
    for operand in site.operands:
        if isinstance(operand, Special) and "cluster" in operand.name:
            yield Finding("ptx.target", f"{operand.name} needs sm_90, the target is {target}")


def _kernel_rules(kernel: Kernel, target: Target) -> Iterator[Finding]:
    if kernel.reqntid is not None and kernel.maxntid is not None:
        yield Finding("ptx.directive", f"kernel {kernel.name} has .reqntid and .maxntid; keep one")
    if kernel.cluster_dims is not None and kernel.maxclusterrank is not None:
        yield Finding("ptx.directive", f"kernel {kernel.name} has .reqnctapercluster and .maxclusterrank")
    clustered = (
        kernel.cluster_dims is not None or kernel.maxclusterrank is not None or kernel.explicit_cluster
    )
    if clustered and target.number < 90:
        yield Finding("ptx.target", f"kernel {kernel.name} asks for clusters, which need sm_90, not {target}")
    if kernel.static_shared_bytes > MAX_STATIC_SHARED_BYTES:
        yield Finding(
            "ptx.shared",
            f"kernel {kernel.name} declares {kernel.static_shared_bytes} bytes of static shared memory, "
            f"the limit is {MAX_STATIC_SHARED_BYTES}; make it extern (dynamic)",
        )
    if kernel.params_bytes > MAX_PARAMETER_BYTES:
        yield Finding(
            "ptx.param",
            f"kernel {kernel.name} has {kernel.params_bytes} bytes of parameters, the limit is "
            f"{MAX_PARAMETER_BYTES}; pass a pointer",
        )


def violations(module: Module) -> Iterator[PtxError]:
    """Everything ptxas would refuse in ``module``, as far as the rules here know it."""
    target = Target.parse(module.target)
    for kernel in module.kernels.values():
        for finding in _kernel_rules(kernel, target):
            yield PtxError(finding.message, rule=finding.rule)
    functions: list[Function] = [*module.kernels.values(), *module.functions.values()]
    for function in functions:
        for instr in function.instrs:
            site = Site(instr, function, target)
            source = str(instr.source) if instr.source is not None else None
            for finding in _target_rules(site):
                yield PtxError(finding.message, line=instr.line, rule=finding.rule, source=source)
            for table in _TABLES:
                for rule in table.get(instr.opcode, ()):
                    for finding in rule(site):
                        yield PtxError(finding.message, line=instr.line, rule=finding.rule, source=source)


def check(module: Module) -> None:
    """Raise the first of :func:`violations`."""
    for violation in violations(module):
        raise violation


def load(text: str) -> Module:
    """Parse and check one PTX text."""
    module = parse(text)
    check(module)
    return module
