"""What global and shared memory have in common: typed views, the shadow, poison, atomics."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from smfree.emulator.errors import EmulationError, MemoryFault, Unsupported

#: Receives a finding that execution could survive. Raises it by default; may record it and return.
Report = Callable[[EmulationError], None]

POISON = 0xFF
#: Values of the shadow, one byte per byte of memory.
UNWRITTEN, WRITTEN, AWAITS_COPY, BARRIER = 0, 1, 2, 3

WORDS: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4, 32: 5}
_VIEW_TYPES = {**WORDS, 16: np.complex128}
_U64 = np.uint64
or_reduce = np.bitwise_or.reduce
max_reduce = np.maximum.reduce
min_reduce = np.minimum.reduce


def raise_finding(finding: EmulationError) -> None:
    """The default :data:`Report`."""
    raise finding


def as_addresses(addr: np.ndarray | int) -> np.ndarray:
    """One-dimensional, contiguous int64."""
    out = np.ascontiguousarray(addr)
    if out.dtype != np.int64:
        out = out.astype(np.int64)
    return out if out.ndim == 1 else out.reshape(-1)


class TypedBytes:
    """One uint8 array seen as words of 1 to 32 bytes; index = byte offset / word size."""

    __slots__ = ("raw", "views")

    def __init__(self, raw: np.ndarray) -> None:
        self.raw = raw
        self.views: dict[int, np.ndarray] = {size: raw.view(kind) for size, kind in _VIEW_TYPES.items()}
        self.views[32] = self.views[16].reshape(-1, 2)

    def take(self, index: np.ndarray, size: int) -> np.ndarray:
        """Words at ``index``; the caller has checked the range."""
        if size == 32:
            return self.views[32].take(index, axis=0, mode="clip")
        return self.views[size].take(index, mode="clip")

    def put(self, index: np.ndarray, size: int, words: np.ndarray) -> None:
        """Store words ([n], or [n, 2] for 32 bytes); the last duplicate wins."""
        if size == 32:
            view = self.views[16]
            view[index << 1] = words[:, 0]
            view[(index << 1) + 1] = words[:, 1]
        else:
            self.views[size][index] = words

    def put_constant(self, index: np.ndarray, size: int, byte: int) -> None:
        """Set every byte of these words to ``byte``."""
        if size == 32:
            self.put_constant(index << 1, 16, byte)
            self.put_constant((index << 1) + 1, 16, byte)
        else:
            self.views[size][index] = constant_word(size, byte)

    def all_equal(self, index: np.ndarray, size: int, byte: int) -> bool:
        """Does every byte of these words equal ``byte``?"""
        words: np.ndarray = self.take(index, size)
        if size > 8:
            words = words.view(_U64)
        return bool((words == constant_word(min(size, 8), byte)).all())


def blocks(array: np.ndarray, start: np.ndarray, length: int) -> list[np.ndarray]:
    """Views of array[s : s + length] for every s in ``start``: one 2-D view when they are evenly spaced."""
    first = int(start[0])
    if len(start) > 1:
        step = int(start[1]) - first
        if step >= length and bool((start[1:] - start[:-1] == step).all()):
            width = array.itemsize
            shape, strides = (len(start), length), (step * width, width)
            return [np.ndarray(shape, array.dtype, array, first * width, strides)]
        return [array[s : s + length] for s in start.tolist()]
    return [array[first : first + length]]


def constant_word(size: int, byte: int) -> np.generic:
    """A word whose bytes are all ``byte``."""
    return np.frombuffer(bytes([byte]) * size, dtype=_VIEW_TYPES[size])[0]


def as_words(values: np.ndarray, n: int) -> tuple[np.ndarray, int]:
    """[n] or [n, elems] of any dtype -> (words of the whole vector, its size in bytes)."""
    values = np.ascontiguousarray(values)
    size = values.nbytes // n
    if size not in SHIFT:
        raise ValueError(f"an access moves 1, 2, 4, 8, 16 or 32 bytes per thread, not {size}")
    words: np.ndarray = values.reshape(-1).view(_VIEW_TYPES[min(size, 16)])
    return (words.reshape(n, 2) if size == 32 else words), size


def as_elements(words: np.ndarray, n: int, elem_bytes: int, elems: int) -> np.ndarray:
    """Gathered words -> uint{8 * elem_bytes}[n, elems]."""
    return words.view(WORDS[elem_bytes]).reshape(n, elems)


class ByteSpace:
    """``data`` uint8 bytes and ``written`` uint8 shadow (see :data:`UNWRITTEN` and its neighbours).

    Addresses are int64[n]. Every access is checked for bounds, natural alignment of the whole vector, and,
    when it reads, for bytes that nobody wrote; a :class:`MemoryFault` carries the first offending position as
    ``index``. A never-written read is passed to ``report``; if that returns, the bytes read as
    :data:`POISON`.
    """

    name: str
    data: np.ndarray
    written: np.ndarray
    report: Report
    _bytes: TypedBytes
    _shadow: TypedBytes

    def load(self, addr: np.ndarray, elem_bytes: int, elems: int = 1) -> np.ndarray:
        """-> uint{8*elem_bytes}[n, elems], C-contiguous."""
        raise NotImplementedError

    def store(self, addr: np.ndarray, values: np.ndarray) -> None:
        """``values``: any 1/2/4/8-byte dtype, [n, elems] (or [n]). Of duplicates the last lane wins."""
        raise NotImplementedError

    def _atomic_words(self, addr: np.ndarray, size: int) -> tuple[TypedBytes, np.ndarray]:
        """Check a read-modify-write; -> storage and word indices."""
        raise NotImplementedError

    #: ``atom.add.f32`` on global memory flushes subnormals, on shared memory it does not (PTX ISA, atom).
    _flush_subnormal_adds = False

    def atomic(
        self, op: str, addr: np.ndarray, value: np.ndarray, compare: np.ndarray | None = None
    ) -> np.ndarray:
        """Read-modify-write, one lane after another in lane order -> old values, dtype of ``value``.

        op: add min max and or xor exch cas inc dec; the operand type is ``value.dtype`` (u32 s32 u64 s64 f32
        f64 f16 as numpy types). ``compare`` is cas's first operand.
        """
        addr = as_addresses(addr)
        value = np.ascontiguousarray(value).reshape(-1)
        n = addr.shape[0]
        if value.shape[0] != n:
            value = np.ascontiguousarray(np.broadcast_to(value, n))
        if n == 0:
            return value.copy()
        storage, index = self._atomic_words(addr, value.itemsize)
        words = storage.raw.view(value.dtype)
        return apply_atomic(words, index, op, value, compare, flush=self._flush_subnormal_adds)


def atomic_changes(op: str, old: np.ndarray, value: np.ndarray, compare: np.ndarray | None) -> bool:
    """Whether an atomic operation changed what it found anywhere."""
    match op:
        case "cas":
            return bool(((old == compare) & (value != compare)).any())
        case "exch":
            return bool((old != value).any())
        case "add" | "xor":
            return bool((value != 0).any())
        case "or":
            return bool((value & ~old).any())
        case "and":
            return bool((old & ~value).any())
        case "min":
            return bool((value < old).any())
        case "max":
            return bool((value > old).any())
    return True


def _flush(x: np.ndarray) -> np.ndarray:
    tiny = np.finfo(np.float32).tiny
    return np.where(np.abs(x) < tiny, np.copysign(np.float32(0), x), x)


def _scalar_update(op: str, old: np.generic, value: np.generic, compare: np.generic | None) -> np.generic:
    if op == "cas":
        return value if old == compare else old
    if op == "inc":
        return type(old)(0) if old >= value else type(old)(int(old) + 1)  # type: ignore[operator]
    if op == "dec":
        return value if old == 0 or old > value else type(old)(int(old) - 1)  # type: ignore[operator]
    raise AssertionError(op)


_UFUNCS: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def apply_atomic(
    words: np.ndarray,
    index: np.ndarray,
    op: str,
    value: np.ndarray,
    compare: np.ndarray | None,
    *,
    flush: bool,
) -> np.ndarray:
    """``op`` on ``words[index]`` lane by lane; duplicates see each other's results. -> old values."""
    if op not in _UFUNCS and op not in ("exch", "cas", "inc", "dec"):
        raise Unsupported(
            f"atomic operation '{op}' is not modelled; use add min max and or xor exch cas inc or dec",
            rule="atomic.op",
        )
    flush = flush and op == "add" and value.dtype == np.float32
    if flush:
        value = _flush(value)
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    first = np.empty(len(index), bool)
    first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    if first.all():
        old = words[index]
        words[index] = _update(op, old, value, compare, flush)
        return old
    out = np.empty_like(value)
    starts = np.flatnonzero(first)
    ends = np.append(starts[1:], len(index))
    if op in _UFUNCS or op == "exch":
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            lanes = order[start:end]
            chain = np.concatenate((words[ordered[start : start + 1]], value[lanes]))
            if op != "exch":
                with np.errstate(over="ignore", invalid="ignore"):
                    chain = _UFUNCS[op].accumulate(chain, dtype=chain.dtype)
            if flush and bool(((np.abs(chain) < np.finfo(np.float32).tiny) & (chain != 0)).any()):
                chain = _flush(np.concatenate((words[ordered[start : start + 1]], value[lanes])))
                for step in range(1, len(chain)):
                    chain[step] = _flush(chain[step - 1] + chain[step])
            out[lanes] = chain[:-1]
            words[ordered[start]] = chain[-1]
        return out
    expected = np.broadcast_to(compare, index.shape) if compare is not None else [None] * len(index)
    for lane, where in enumerate(index.tolist()):
        old_word = words[where]
        out[lane] = old_word
        words[where] = _scalar_update(op, old_word, value[lane], expected[lane])
    return out


def _update(
    op: str, old: np.ndarray, value: np.ndarray, compare: np.ndarray | None, flush: bool
) -> np.ndarray:
    if op == "exch":
        return value
    if op == "cas":
        return np.where(old == compare, value, old)
    if op == "inc":
        return np.where(old >= value, np.zeros_like(old), old + np.ones_like(old))
    if op == "dec":
        return np.where((old == 0) | (old > value), value, old - np.ones_like(old))
    with np.errstate(over="ignore", invalid="ignore"):
        if flush:
            return _flush(_flush(old) + value)
        return _UFUNCS[op](old, value)


def fault(rule: str, index: int | None, what: str, remedy: str) -> MemoryFault:
    """One sentence for the rule and its value, one for the remedy."""
    return MemoryFault(f"{what}; {remedy}", rule=rule, index=index)


def signed(address: int) -> int:
    """A 64-bit address as arrays of addresses keep it: those from 2^63 on are negative."""
    return (address + (1 << 63)) % (1 << 64) - (1 << 63)


def shown(address: int) -> str:
    """An address as a pointer reads, also one that is :func:`signed`."""
    return f"0x{address % (1 << 64):x}"
