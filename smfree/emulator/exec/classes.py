"""Under which name an executed instruction is counted (docs/counting.md)."""

from __future__ import annotations

from smfree.emulator.ptx import ast


def instruction_class(instr: ast.Instr) -> str:
    """Name under which an instruction is counted (docs/counting.md)."""
    op, mods = instr.opcode, instr.modifiers
    if op in ("ld", "st") and "shared::cluster" in mods:
        return f"cluster {'store' if op == 'st' else 'load'}"
    if op in ("ld", "st", "ldu"):
        space = next(
            (
                m.partition("::")[0]
                for m in mods
                if m.partition("::")[0] in ("global", "shared", "local", "param", "const")
            ),
            "generic",
        )
        return f"{space} {'store' if op == 'st' else 'load'}"
    if op in ("atom", "red"):
        return "atomic"
    if op == "multimem":
        return "multimem"
    if op == "cp":
        if "commit_group" in mods or "wait_group" in mods or "wait_all" in mods:
            return "copy group"
        return "tma" if "bulk" in mods else "cp.async"
    if op in ("bar", "barrier"):
        return "barrier"
    if op in ("mbarrier", "bra"):
        return {"bra": "branch"}.get(op, op)
    if op in ("ret", "exit"):
        return "branch"
    if op in ("fence", "membar"):
        return "fence"
    if op == "tensormap":
        return "tensor map"
    if op in ("elect", "vote", "shfl", "activemask", "redux"):
        return "warp"
    if op in ("ldmatrix", "stmatrix"):
        return "shared load" if op == "ldmatrix" else "shared store"
    if op in ("mma", "movmatrix"):
        return "matrix"
    return "alu"
