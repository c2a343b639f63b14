"""Divergence and reconvergence: programs against a Python interpreter that runs one thread at a time."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from smfree.emulator.errors import MemoryFault
from smfree.emulator.exec.schedule import SCHEDULES
from tests.emulator.exec_kit import Machine, cuda_kernel, every_schedule, execute, kernel, report

MASK = 0xFFFFFFFF
COUNTERS = 4

# ------------------------------------------------------------------- random structured programs, two readings

# Statements are tuples; registers x0..x3 are %r10..%r13.
#   ("op", d, name, a, b)        x[d] = x[a] name (x[-b-1] if b < 0 else constant b)
#   ("guarded", condition, op)   op where the condition holds
#   ("if", condition, then, else)
#   ("loop", register, body)     (x[register] & 3) turns
#   ("break" | "continue" | "leave", condition)
#   ("count", k)                 add 1 to a counter in memory
_OPS = {
    "add": lambda a, b: a + b & MASK,
    "sub": lambda a, b: a - b & MASK,
    "xor": lambda a, b: a ^ b,
    "and": lambda a, b: a & b,
    "mul": lambda a, b: a * b & MASK,
}
_TEXT = {"add": "add.u32", "sub": "sub.u32", "xor": "xor.b32", "and": "and.b32", "mul": "mul.lo.u32"}
_RELATIONS = {
    "lt": lambda a, b: a < b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}

_register = st.integers(0, 3)
_operand = st.one_of(st.integers(-4, -1), st.sampled_from([0, 1, 2, 3, 5, 7, 0x55555555]))
_condition = st.tuples(
    _register, st.sampled_from(sorted(_RELATIONS)), st.one_of(st.integers(-4, -1), st.integers(0, 40))
)
_op = st.tuples(st.just("op"), _register, st.sampled_from(sorted(_OPS)), _register, _operand)


def _block(depth: int, in_loop: bool) -> st.SearchStrategy[list[Any]]:
    choices: list[st.SearchStrategy[Any]] = [
        _op,
        st.tuples(st.just("guarded"), _condition, _op),
        st.tuples(st.just("count"), st.integers(0, COUNTERS - 1)),
        st.tuples(st.just("leave"), _condition),
    ]
    if in_loop:
        choices.append(st.tuples(st.sampled_from(["break", "continue"]), _condition))
    if depth:
        choices.append(
            st.tuples(st.just("if"), _condition, _block(depth - 1, in_loop), _block(depth - 1, in_loop))
        )
        choices.append(st.tuples(st.just("loop"), _register, _block(depth - 1, True)))
    return st.lists(st.one_of(choices), min_size=1, max_size=4)


class _Leave(Exception):
    pass


@dataclass
class Scalar:
    """One thread of a program, read the plain way."""

    x: list[int]
    counters: list[int]

    def run(self, program: list[Any]) -> list[int]:
        with suppress(_Leave):
            self._block(program)
        return self.x

    def _value(self, b: int) -> int:
        return self.x[-b - 1] if b < 0 else b

    def _holds(self, condition: tuple[int, str, int]) -> bool:
        a, relation, b = condition
        return _RELATIONS[relation](self.x[a], self._value(b))

    def _block(self, block: list[Any]) -> str:
        for s in block:
            match s:
                case ("op", d, name, a, b):
                    self.x[d] = _OPS[name](self.x[a], self._value(b))
                case ("guarded", condition, op):
                    if self._holds(condition):
                        self._block([op])
                case ("count", k):
                    self.counters[k] += 1
                case ("leave", condition):
                    if self._holds(condition):
                        raise _Leave
                case ("break" | "continue" as way, condition):
                    if self._holds(condition):
                        return str(way)
                case ("if", condition, then, otherwise):
                    way = self._block(then if self._holds(condition) else otherwise)
                    if way:
                        return way
                case ("loop", register, body):
                    for _ in range(self.x[register] & 3):
                        if self._block(body) == "break":
                            break
        return ""


@dataclass
class Emitter:
    """The same program as PTX."""

    lines: list[str] = field(default_factory=list)
    labels: int = 0
    loops: int = 0

    def text(self, program: list[Any]) -> str:
        self._block(program, "", "")
        return "\n".join(self.lines)

    def _label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    @staticmethod
    def _value(b: int) -> str:
        return f"%r{10 - b - 1}" if b < 0 else str(b)

    def _test(self, condition: tuple[int, str, int]) -> None:
        a, relation, b = condition
        self.lines.append(f"setp.{relation}.u32 %p1, %r{10 + a}, {self._value(b)};")

    def _op(self, op: tuple[Any, ...], guard: str = "") -> None:
        _, d, name, a, b = op
        self.lines.append(f"{guard}{_TEXT[name]} %r{10 + d}, %r{10 + a}, {self._value(b)};")

    def _block(self, block: list[Any], go_on: str, leave_loop: str) -> None:
        for s in block:
            match s:
                case ("op", *_):
                    self._op(s)
                case ("guarded", condition, op):
                    self._test(condition)
                    self._op(op, "@%p1 ")
                case ("count", k):
                    self.lines.append(f"red.global.add.u32 [%rd1+{4 * k}], 1;")
                case ("leave", condition):
                    self._test(condition)
                    skip = self._label()
                    self.lines += [f"@!%p1 bra {skip};", *_STORE, "exit;", f"{skip}:"]
                case ("break" | "continue" as way, condition):
                    self._test(condition)
                    self.lines.append(f"@%p1 bra {leave_loop if way == 'break' else go_on};")
                case ("if", condition, then, otherwise):
                    self._test(condition)
                    other, end = self._label(), self._label()
                    self.lines.append(f"@!%p1 bra {other};")
                    self._block(then, go_on, leave_loop)
                    self.lines += [f"bra {end};", f"{other}:"]
                    self._block(otherwise, go_on, leave_loop)
                    self.lines.append(f"{end}:")
                case ("loop", register, body):
                    self._loop(register, body)

    def _loop(self, register: int, body: list[Any]) -> None:
        counter = f"%r{20 + self.loops % 18}"
        self.loops += 1
        head, turn, end = self._label(), self._label(), self._label()
        self.lines += [f"and.b32 {counter}, %r{10 + register}, 3;", f"{head}:"]
        self.lines += [
            f"setp.eq.u32 %p1, {counter}, 0;",
            f"@%p1 bra {end};",
            f"sub.u32 {counter}, {counter}, 1;",
        ]
        self._block(body, turn, end)
        self.lines += [f"{turn}:", f"bra {head};", f"{end}:"]


_STORE = [f"st.global.u32 [%rd4+{4 * i}], %r{10 + i};" for i in range(4)]
_ENTRY = ["shl.b32 %r9, %r1, 4;", "cvt.u64.u32 %rd4, %r9;", "add.s64 %rd4, %rd0, %rd4;", "mov.u32 %r10, %r2;",
          "mad.lo.u32 %r11, %r1, 7, 3;", "mov.u32 %r12, 0;", "mov.u32 %r13, %laneid;"]  # fmt: skip


def _check(program: list[Any], block: int, grid: int, schedules: tuple[str, ...]) -> None:
    counters = [0] * COUNTERS
    want = []
    for cta in range(grid):
        for t in range(block):
            x = [t, ((cta * block + t) * 7 + 3) & MASK, 0, t % 32]
            want.append(Scalar(x, counters).run(program))
    body = "\n".join([*_ENTRY, Emitter().text(program), *_STORE])
    k = kernel(body)
    for schedule in schedules:
        m = Machine(schedule)
        out, sums = m.empty(16 * block * grid), m.put(np.zeros(COUNTERS, np.uint32))
        m.launch(k, struct.pack("<QQQI", out, sums, 0, 0), grid=grid, block=block)
        got = m.get(out, 4 * block * grid).reshape(-1, 4)
        assert got.tolist() == want, schedule
        assert m.get(sums, COUNTERS).tolist() == counters, schedule


_NESTED = [
    ("loop", 0, [
        ("if", (0, "lt", 9), [("count", 0), ("break", (3, "eq", 2))],
         [("op", 2, "add", 2, 5), ("continue", (1, "lt", 40))]),
        ("loop", 3, [("op", 2, "xor", 2, -2), ("leave", (2, "eq", 7)), ("break", (2, "ge", 20))]),
        ("count", 1),
    ]),
    ("guarded", (2, "ne", 0), ("op", 0, "mul", 0, 3)),
]  # fmt: skip


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(_block(3, False), st.sampled_from([1, 7, 32, 45, 64]), st.integers(1, 3))
@example(_NESTED, 45, 3)
def test_random_structured_programs_agree_under_all_schedules(
    program: list[Any], block: int, grid: int
) -> None:
    _check(program, block, grid, SCHEDULES)


# ----------------------------------------------------------------------------------------------- unstructured


@every_schedule
def test_irreducible_control_flow(schedule: str) -> None:
    """Two loops entered from both sides, as a state machine with jumps into the middle."""
    body = """
    mov.u32 %r10, %r2;
    mov.u32 %r11, 0;
    and.b32 %r12, %r2, 1;
    setp.eq.u32 %p1, %r12, 0;
    @%p1 bra B;
    A:
    add.u32 %r11, %r11, 1;
    setp.gt.u32 %p2, %r11, 9;
    @%p2 bra END;
    B:
    add.u32 %r11, %r11, 2;
    mad.lo.u32 %r10, %r10, 3, %r11;
    setp.gt.u32 %p3, %r11, 12;
    @%p3 bra END;
    and.b32 %r13, %r10, 4;
    setp.ne.u32 %p4, %r13, 0;
    @%p4 bra B;
    bra A;
    END:
    st.global.u32 [%rd3], %r10;
    """

    def thread(t: int) -> int:
        x, n, at = t, 0, "A" if t & 1 else "B"
        while True:
            if at == "A":
                n += 1
                if n > 9:
                    return x
                at = "B"
                continue
            n += 2
            x = x * 3 + n & MASK
            if n > 12:
                return x
            at = "B" if x & 4 else "A"

    assert execute(body, block=75, schedule=schedule).out.tolist() == [thread(t) for t in range(75)]


@every_schedule
def test_lanes_loop_different_numbers_of_times(schedule: str) -> None:
    """Collatz steps: trip counts from 0 to above 100, some lanes leaving early by exit."""
    body = """
    add.u32 %r10, %r1, 1;
    mov.u32 %r11, 0;
    LOOP:
    setp.eq.u32 %p1, %r10, 1;
    @%p1 bra DONE;
    and.b32 %r12, %r10, 1;
    setp.eq.u32 %p2, %r12, 0;
    @%p2 bra EVEN;
    mad.lo.u32 %r10, %r10, 3, 1;
    bra NEXT;
    EVEN:
    shr.u32 %r10, %r10, 1;
    NEXT:
    add.u32 %r11, %r11, 1;
    setp.gt.u32 %p3, %r11, 90;
    @!%p3 bra LOOP;
    st.global.u32 [%rd3], 999;
    exit;
    DONE:
    st.global.u32 [%rd3], %r11;
    """

    def steps(n: int) -> int:
        count = 0
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            count += 1
            if count > 90:
                return 999
        return count

    got = execute(body, block=96, grid=2, schedule=schedule).out.tolist()
    assert got == [steps(i + 1) for i in range(192)]
    assert 999 in got


def test_divergent_lanes_run_together_again_behind_the_branch() -> None:
    """Reconvergence shows in the counters: behind an if/else the warp issues once, not twice."""
    body = """
    setp.lt.u32 %p1, %r2, 10;
    @%p1 bra LOW;
    st.global.u32 [%rd3], 1;
    bra END;
    LOW:
    st.global.u32 [%rd3], 2;
    END:
    st.global.u32 [%rd3+128], 3;
    st.global.u32 [%rd3+256], 4;
    """
    for schedule in ("min-pc", "timed", "async-latest", "producer-ahead"):
        counters = execute(body, words=96, schedule=schedule).counters
        assert counters.global_store_requests == 4, schedule
        assert counters.warp_instructions == 12 + 3 + 3, schedule
        # 10 of the entry, setp, two stores, ret by all; the branch by 10; store and bra by 22; store by 10
        assert counters.thread_instructions == 32 * 14 + 10 + 2 * 22 + 10, schedule


@pytest.mark.parametrize(
    ("block", "grid"),
    [((8, 4, 2), (1, 1, 1)), ((5, 3, 3), (4, 3, 2)), ((33, 1, 1), (7, 1, 1)), ((1, 1, 1), (3, 2, 1)),
     ((1, 40, 1), (1, 1, 5)),
     ((2, 2, 64), (1, 3, 1))],
)  # fmt: skip
@pytest.mark.parametrize("schedule", ["min-pc", "timed", "random"])
def test_thread_and_block_coordinates(
    block: tuple[int, int, int], grid: tuple[int, int, int], schedule: str
) -> None:
    names = [f"%{r}.{a}" for r in ("tid", "ntid", "ctaid", "nctaid") for a in "xyz"] + ["%laneid", "%warpid"]
    body = """
    mov.u32 %r10, %ctaid.z;
    mov.u32 %r11, %nctaid.y;
    mov.u32 %r12, %ctaid.y;
    mad.lo.u32 %r10, %r10, %r11, %r12;
    mov.u32 %r11, %nctaid.x;
    mad.lo.u32 %r10, %r10, %r11, %r3;
    mov.u32 %r11, %ntid.z;
    mad.lo.u32 %r10, %r10, %r11, 0;
    mov.u32 %r11, %tid.z;
    add.u32 %r10, %r10, %r11;
    mov.u32 %r11, %ntid.y;
    mov.u32 %r12, %tid.y;
    mad.lo.u32 %r10, %r10, %r11, %r12;
    mov.u32 %r11, %ntid.x;
    mad.lo.u32 %r10, %r10, %r11, %r2;
    mul.wide.u32 %rd4, %r10, 64;
    add.s64 %rd4, %rd0, %rd4;
    """
    for i, name in enumerate(names):
        body += f"mov.u32 %r13, {name};\nst.global.u32 [%rd4+{4 * i}], %r13;\n"
    threads, ctas = int(np.prod(block)), int(np.prod(grid))
    got = execute(body, block=block, grid=grid, words=16 * threads * ctas, schedule=schedule).out.reshape(
        ctas, threads, 16
    )
    for c in range(ctas):
        cta = (c % grid[0], c // grid[0] % grid[1], c // (grid[0] * grid[1]))
        for t in range(threads):
            tid = (t % block[0], t // block[0] % block[1], t // (block[0] * block[1]))
            assert got[c, t, :14].tolist() == [*tid, *block, *cta, *grid, t % 32, t // 32]


@every_schedule
def test_more_ctas_than_fit_run_in_waves(schedule: str) -> None:
    """Three waves and a rest; CTAs of later waves find fresh shared memory."""
    shared = ".shared .align 16 .b8 sm[200];"
    body = """
    mov.u32 %r10, sm;
    shl.b32 %r11, %r2, 2;
    add.u32 %r10, %r10, %r11;
    st.shared.u32 [%r10], %r1;
    bar.sync 0;
    ld.shared.u32 %r12, [%r10];
    and.b32 %r13, %r3, 3;
    LOOP:
    setp.eq.u32 %p1, %r13, 0;
    @%p1 bra END;
    sub.u32 %r13, %r13, 1;
    add.u32 %r12, %r12, 1000;
    bra LOOP;
    END:
    st.global.u32 [%rd3], %r12;
    """
    k = kernel(body, shared=shared)
    grid = 132 * 3 + 17
    m = Machine(schedule)
    out = m.empty(4 * 40 * grid)
    result = m.launch(k, struct.pack("<QQQI", out, 0, 0, 0), grid=grid, block=40, shared_bytes=150_000)
    assert result.ctas_per_sm == 1
    ids = np.arange(40 * grid)
    assert (m.get(out, 40 * grid) == ids + 1000 * (ids // 40 % 4)).all()


@every_schedule
def test_a_later_wave_does_not_see_the_shared_memory_of_the_wave_before(schedule: str) -> None:
    body = """
    mov.u32 %r10, sm;
    setp.lt.u32 %p1, %r3, 132;
    @%p1 st.shared.u32 [%r10], %r1;
    ld.shared.u32 %r12, [%r10];
    """
    k = kernel(body, shared=".shared .align 16 .b8 sm[200];")
    m = Machine(schedule)
    params = struct.pack("<QQQI", 0, 0, 0, 0)
    m.launch(k, params, grid=132, block=1, shared_bytes=150_000)
    with pytest.raises(MemoryFault, match="nobody has written"):
        m.launch(k, params, grid=140, block=1, shared_bytes=150_000)


@every_schedule
def test_cuda_code_with_breaks_continues_and_returns(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(unsigned* out, const unsigned* in, unsigned n) {
      const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i >= n) return;
      unsigned x = in[i], sum = 0;
      #pragma unroll 1
      for (unsigned j = 0; j < 20; ++j) {
        if (x % 7 == 3) { x += 5; continue; }
        #pragma unroll 1
        while (x & 1) { x >>= 1; sum += x; if (sum > 5000) { out[i] = ~sum; return; } }
        if (x == 0) break;
        switch (x & 6) { case 0: x /= 3; break; case 2: x -= 1; sum ^= j; break; default: x = x * 5 + 1; }
      }
      out[i] = sum + x;
    }"""

    def thread(x: int) -> int:
        total = 0
        for j in range(20):
            if x % 7 == 3:
                x = x + 5 & MASK
                continue
            while x & 1:
                x >>= 1
                total = total + x & MASK
                if total > 5000:
                    return ~total & MASK
            if x == 0:
                break
            if x & 6 == 0:
                x //= 3
            elif x & 6 == 2:
                x, total = x - 1 & MASK, total ^ j
            else:
                x = x * 5 + 1 & MASK
        return total + x & MASK

    data = np.random.default_rng(8).integers(0, 300, 150).astype(np.uint32)
    m = Machine(schedule)
    out, a = m.put(np.zeros(160, np.uint32)), m.put(data)
    m.launch(cuda_kernel(source), struct.pack("<QQI", out, a, 150), grid=4, block=40)
    assert m.get(out, 160).tolist() == [thread(int(x)) for x in data] + [0] * 10


def test_random_seeds_reproduce_counters_and_reports() -> None:
    body = """
    and.b32 %r10, %r2, 7;
    mov.u32 %r12, 0;
    mov.u32 %r11, 0;
    LOOP:
    setp.eq.u32 %p1, %r10, 0;
    @%p1 bra DONE;
    sub.u32 %r10, %r10, 1;
    atom.global.add.u32 %r11, [%rd1], 1;
    add.u32 %r12, %r12, %r11;
    bra LOOP;
    DONE:
    st.global.u32 [%rd3], %r12;
    {end}
    """
    zero = np.zeros(1, np.uint32)
    runs = [
        execute(body.format(end=""), schedule="random", seed=s, block=64, grid=3, a=zero) for s in (1, 1, 2)
    ]
    assert (runs[0].out == runs[1].out).all()
    assert not (runs[0].out == runs[2].out).all()
    assert runs[0].counters == runs[1].counters
    assert runs[0].counters.thread_instructions == runs[2].counters.thread_instructions
    wrong = "setp.gt.u32 %p2, %r11, 300;\n@%p2 ld.global.u32 %r13, [%rd1+4096];"
    texts = []
    for seed in (1, 1):
        with pytest.raises(MemoryFault, match=r"past the end|allocation") as caught:
            execute(body.format(end=wrong), schedule="random", seed=seed, block=64, grid=3, a=zero)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@every_schedule
def test_a_kernel_may_end_without_ret(schedule: str) -> None:
    assert execute("st.global.u32 [%rd3], %r2;", schedule=schedule).out.tolist() == list(range(32))


@every_schedule
def test_unwritten_local_memory_is_called_local(schedule: str) -> None:
    k = cuda_kernel(
        """extern "C" __global__ void k(unsigned* out, const unsigned* a, const unsigned* b, unsigned n) {
        unsigned q[8]; q[n & 7] = n; out[threadIdx.x] = q[(n + 3) & 7]; }"""
    )
    with report("local+0x", "of the thread", "ld.local", rule="memory.uninitialized", kind=MemoryFault):
        m = Machine(schedule)
        m.launch(k, struct.pack("<QQQI", m.empty(128), 0, 0, 1))
