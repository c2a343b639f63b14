"""Global and shared memory: values, bounds, alignment, bytes nobody wrote, use after free, atomics."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smfree.emulator.errors import EmulationError, MemoryFault, Unsupported
from smfree.emulator.memory import POISON, GlobalMemory, SharedMemory

PITCH = 4096
SIZES = [1, 2, 4, 8, 16, 32]


def lanes(*addresses: int) -> np.ndarray:
    return np.array(addresses, np.int64)


@pytest.fixture
def memory() -> GlobalMemory:
    return GlobalMemory(capacity_bytes=64 << 20)


@pytest.fixture
def shared() -> SharedMemory:
    return SharedMemory(slots=3, pitch=PITCH, limit=3000)


def shape(size: int) -> tuple[int, int]:
    """Element bytes and elements of an access of ``size`` bytes."""
    return min(size, 8), max(1, size // 8)


# --- values ---


@pytest.mark.parametrize("size", SIZES)
def test_global_store_then_load_in_any_lane_order(memory: GlobalMemory, size: int) -> None:
    rng = np.random.default_rng(size)
    base = memory.alloc(512 * size)
    elem, elems = shape(size)
    values = rng.integers(0, 256, (512, size), dtype=np.uint8).view(f"u{elem}")
    addr = base + rng.permutation(512).astype(np.int64) * size
    memory.store(addr, values)
    assert (memory.load(addr, elem, elems) == values).all()
    flat = np.empty((512, size), np.uint8)
    flat[(addr - base) // size] = values.view(np.uint8)
    assert (memory.read(base, 512 * size) == flat.reshape(-1)).all()


@pytest.mark.parametrize("size", SIZES)
def test_shared_store_then_load_across_slots(shared: SharedMemory, size: int) -> None:
    rng = np.random.default_rng(size)
    elem, elems = shape(size)
    offsets = rng.permutation(64).astype(np.int64) * size
    addr = np.concatenate([offsets + slot * PITCH for slot in range(3)])
    values = rng.integers(0, 256, (192, size), dtype=np.uint8).view(f"u{elem}")
    shared.store(addr, values)
    assert (shared.load(addr, elem, elems) == values).all()


def test_vector_loads_see_narrow_stores(shared: SharedMemory) -> None:
    shared.store(np.arange(16, dtype=np.int64), np.arange(16, dtype=np.uint8))
    assert shared.load(lanes(0), 4, 4).view(np.uint8).tolist() == [list(range(16))]
    assert shared.load(lanes(4), 4).tolist() == [[0x07060504]]


def test_of_duplicate_addresses_the_last_lane_wins(memory: GlobalMemory) -> None:
    base = memory.alloc(16)
    memory.store(lanes(base, base, base), np.array([1, 2, 3], np.uint32))
    assert memory.load(lanes(base), 4).item() == 3


def test_lanes_in_several_allocations(memory: GlobalMemory) -> None:
    first, second = memory.alloc(64), memory.alloc(64)
    addr = lanes(first, second, first + 16, second + 48)
    values = np.arange(16, dtype=np.uint32).reshape(4, 4)
    memory.store(addr, values)
    assert (memory.load(addr, 4, 4) == values).all()
    with pytest.raises(MemoryFault) as fault:
        memory.load(np.append(addr, first + 32), 4, 4)
    assert fault.value.rule == "memory.uninitialized" and fault.value.index == 4


def test_no_lanes(memory: GlobalMemory, shared: SharedMemory) -> None:
    for space in (memory, shared):
        assert space.load(lanes(), 4, 2).shape == (0, 2)
        space.store(lanes(), np.empty((0, 2), np.uint32))
        assert len(space.atomic("add", lanes(), np.empty(0, np.uint32))) == 0


def test_addresses_lie_above_4_gib_and_differ_between_devices() -> None:
    spans = []
    for ordinal in range(2):
        memory = GlobalMemory(ordinal, capacity_bytes=3 << 30)
        start = memory.alloc(3 << 30)
        spans.append(range(start, start + (3 << 30)))
        far = start + (5 << 29)  # more than 2^31 bytes into the allocation
        memory.store(lanes(far), np.array([0xABCD], np.uint32))
        assert memory.load(lanes(far), 4).item() == 0xABCD
    assert min(span.start for span in spans) > 1 << 32
    assert not (set(spans[0][:: 1 << 29]) & set(spans[1][:: 1 << 29]))


# --- faults ---


def test_out_of_bounds_names_lane_distance_and_label(memory: GlobalMemory) -> None:
    base = memory.alloc(1000, label="src")
    memory.fill(base, 1000, 0)
    addr = base + np.arange(64, dtype=np.int64) * 16
    with pytest.raises(MemoryFault) as fault:
        memory.load(addr, 4, 4)
    assert fault.value.rule == "memory.bounds" and fault.value.index == 62
    assert "runs 8 bytes past the end of allocation 'src'" in str(fault.value)
    assert memory.load(addr[:62], 4, 4).shape == (62, 4)


@pytest.mark.parametrize(
    ("distance", "where"),
    [(0, "0 bytes past the end"), (100, "100 bytes past the end"), (255, "1 bytes before")],
)
def test_the_red_zone_behind_an_allocation(memory: GlobalMemory, distance: int, where: str) -> None:
    base = memory.alloc(256)
    memory.alloc(256)
    with pytest.raises(MemoryFault, match=f"{where} of allocation" if distance < 255 else where):
        memory.store(lanes(base + 256 + distance), np.zeros(1, np.uint8))


def test_null_and_negative_addresses(memory: GlobalMemory, shared: SharedMemory) -> None:
    with pytest.raises(MemoryFault, match="outside every allocation"):
        memory.load(lanes(0), 4)
    memory.alloc(64)
    for space, bad in ((memory, -16), (memory, 0), (shared, -16), (shared, 3 * PITCH), (shared, 1 << 40)):
        with pytest.raises(MemoryFault) as fault:
            space.store(lanes(bad), np.zeros(1, np.uint32))
        assert fault.value.rule == "memory.bounds"


@pytest.mark.parametrize("size", SIZES[1:])
def test_misaligned_access_names_the_lane(memory: GlobalMemory, shared: SharedMemory, size: int) -> None:
    base = memory.alloc(256)
    memory.fill(base, 256, 0)
    shared.store(np.arange(256, dtype=np.int64), np.zeros(256, np.uint8))
    elem, elems = shape(size)
    for space, start in ((memory, base), (shared, 0)):
        addr = lanes(start, start + size, start + size + size // 2)
        with pytest.raises(MemoryFault, match=f"must be {size}-byte aligned") as fault:
            space.load(addr, elem, elems)
        assert fault.value.rule == "memory.misaligned" and fault.value.index == 2
        assert len(space.load(addr[:2], elem, elems)) == 2


def test_shared_access_beyond_the_ctas_own_bytes(shared: SharedMemory) -> None:
    shared.store(lanes(PITCH + 2996), np.zeros(1, np.uint32))
    for offset in (3000, PITCH - 4):
        with pytest.raises(MemoryFault, match="the CTA has 3000 bytes") as fault:
            shared.store(lanes(PITCH, PITCH + offset), np.zeros(2, np.uint32))
        assert fault.value.index == 1
    with pytest.raises(MemoryFault, match="8 bytes past its end"):
        shared.load(lanes(2992), 8, 2)
    with pytest.raises(MemoryFault, match="nobody has written"):
        shared.load(lanes(2992), 8)
    shared.reset(np.array([1]), limit=3200)
    shared.store(lanes(PITCH + 3000), np.zeros(1, np.uint32))


def test_reading_bytes_nobody_wrote(memory: GlobalMemory, shared: SharedMemory) -> None:
    base = memory.alloc(64)
    for space, start in ((memory, base), (shared, 0)):
        space.store(lanes(start, start + 4, start + 8), np.zeros(3, np.uint32))
        assert space.load(lanes(start), 4, 2).tolist() == [[0, 0]]
        with pytest.raises(MemoryFault, match="reads 4 bytes nobody has") as fault:
            space.load(lanes(start), 4, 4)
        assert fault.value.rule == "memory.uninitialized" and fault.value.index == 0


def test_unwritten_bytes_read_as_poison_when_the_finding_is_only_recorded() -> None:
    findings: list[EmulationError] = []
    memory = GlobalMemory(capacity_bytes=1 << 20, report=findings.append)
    shared = SharedMemory(1, PITCH, PITCH, report=findings.append)
    base = memory.alloc(64)
    for space, start in ((memory, base), (shared, 0)):
        space.store(lanes(start), np.array([7], np.uint32))
        assert space.load(lanes(start), 4, 2).tolist() == [[7, 0xFFFFFFFF]]
    assert [f.rule for f in findings] == ["memory.uninitialized"] * 2


def test_a_new_cta_does_not_see_the_old_ones_data(shared: SharedMemory) -> None:
    addr = lanes(0, PITCH)
    shared.store(addr, np.array([1, 2], np.uint32))
    shared.reset(np.array([0]))
    assert shared.load(addr[1:], 4).item() == 2
    with pytest.raises(MemoryFault, match="nobody has written"):
        shared.load(addr[:1], 4)


def test_use_after_free_and_double_free(memory: GlobalMemory) -> None:
    base = memory.alloc(64, label="tile")
    memory.fill(base, 64, 1)
    memory.load(lanes(base), 4)
    memory.free(base)
    for action in (
        lambda: memory.load(lanes(base), 4),
        lambda: memory.store(lanes(base), np.zeros(1, np.uint32)),
    ):
        with pytest.raises(MemoryFault, match="freed allocation 'tile'") as fault:
            action()
        assert fault.value.rule == "memory.use_after_free"
    with pytest.raises(MemoryFault, match="second free"):
        memory.free(base)
    with pytest.raises(MemoryFault, match="not the start of an allocation"):
        memory.free(memory.alloc(64) + 16)


def test_capacity_and_reuse_of_freed_ranges() -> None:
    memory = GlobalMemory(capacity_bytes=1 << 20)
    with pytest.raises(MemoryError, match="is full"):
        memory.alloc((1 << 20) + 1)
    for _ in range(200):  # 200 MiB through 1 MiB of capacity and 65 MiB of addresses
        base = memory.alloc(1 << 20)
        with pytest.raises(MemoryFault, match="nobody has written"):
            memory.load(lanes(base), 4)
        memory.fill(base, 1 << 20, 0x55)
        memory.free(base)
        assert not memory.span(base, 1 << 20)[0].any()  # the pages went back
    assert memory.allocated_bytes == 0


# --- the host's side ---


def test_host_write_fill_read(memory: GlobalMemory) -> None:
    base = memory.alloc(24)
    assert (memory.read(base, 24) == POISON).all()
    memory.fill(base, 8, b"\x01\x02")
    memory.write(base + 8, np.arange(4, dtype=np.uint16))
    assert memory.read(base, 20).tolist() == [1, 2] * 4 + [0, 0, 1, 0, 2, 0, 3, 0] + [POISON] * 4
    memory.write(base, b"")
    assert len(memory.read(base, 0)) == 0
    with pytest.raises(MemoryFault, match="host write of 25 bytes"):
        memory.write(base, bytes(25))
    with pytest.raises(ValueError, match="use a multiple"):
        memory.fill(base, 3, b"\x01\x02")


def test_device_to_device_copy_keeps_unwritten_bytes_unwritten() -> None:
    one, two = GlobalMemory(0, 1 << 20), GlobalMemory(1, 1 << 20)
    src, dst = one.alloc(64), two.alloc(64)
    one.fill(src, 32, 9)
    two.fill(dst, 64, 1)
    two.copy(dst, one, src, 64)
    assert two.load(lanes(dst), 1).item() == 9
    with pytest.raises(MemoryFault, match="nobody has written"):
        two.load(lanes(dst + 32), 4)


def test_every_byte_stored_by_lanes_makes_the_allocation_full(memory: GlobalMemory) -> None:
    base = memory.alloc(4096)
    for start in range(0, 4096, 1024):
        memory.store(base + start + np.arange(64, dtype=np.int64) * 16, np.zeros((64, 4), np.uint32))
    found = memory.allocation_of(base + 4095)
    assert found is not None and found.full and memory.allocation_of(base + 4096) is None


# --- atomics ---


def one_by_one(op: str, start: int, values: list[int], compare: list[int]) -> tuple[list[int], int]:
    olds, word = [], start
    for value, wanted in zip(values, compare, strict=True):
        olds.append(word)
        word = {
            "add": (word + value) & 0xFFFFFFFF,
            "min": min(word, value),
            "max": max(word, value),
            "and": word & value,
            "or": word | value,
            "xor": word ^ value,
            "exch": value,
            "cas": value if word == wanted else word,
            "inc": 0 if word >= value else word + 1,
            "dec": value if word == 0 or word > value else word - 1,
        }[op]
    return olds, word


@settings(max_examples=150)
@given(
    st.sampled_from(["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"]),
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2**32 - 1) | st.integers(0, 4), st.integers(0, 4)),
        min_size=1,
    ),
    st.booleans(),
)
def test_atomics_equal_one_lane_after_another(
    op: str, work: list[tuple[int, int, int]], on_shared: bool
) -> None:
    space = SharedMemory(1, PITCH, PITCH) if on_shared else GlobalMemory(capacity_bytes=1 << 20)
    base = 0 if isinstance(space, SharedMemory) else space.alloc(64)
    space.store(base + np.arange(4, dtype=np.int64) * 4, np.array([0, 1, 2, 3], np.uint32))
    addr = base + 4 * np.array([w[0] for w in work], np.int64)
    value, compare = (np.array([w[i] for w in work], np.uint32) for i in (1, 2))
    old = space.atomic(op, addr, value, compare if op == "cas" else None)
    for word in range(4):
        mine = [i for i, w in enumerate(work) if w[0] == word]
        olds, final = one_by_one(op, word, value[mine].tolist(), compare[mine].tolist())
        assert old[mine].tolist() == olds
        assert space.load(lanes(base + 4 * word), 4).item() == final


def test_signed_atomics_compare_as_signed(shared: SharedMemory) -> None:
    shared.store(lanes(0), np.array([5], np.int32))
    assert shared.atomic("min", lanes(0, 0), np.array([-1, 3], np.int32)).tolist() == [5, -1]
    assert shared.load(lanes(0), 4).view(np.int32).item() == -1


def test_float_adds_round_in_lane_order_and_flush_subnormals_only_in_global(memory: GlobalMemory) -> None:
    shared = SharedMemory(1, PITCH, PITCH)
    base = memory.alloc(64)
    values = np.array([1e8, 1.0, -1e8, 1.0], np.float32)
    tiny = np.array([1e-40, 1e-40], np.float32)
    for space, start, left in ((memory, base, 0.0), (shared, 0, float(tiny[0] + tiny[1]))):
        space.store(lanes(start, start + 4), np.zeros(2, np.float32))
        space.atomic("add", np.full(4, start), values)
        assert space.load(lanes(start), 4).view(np.float32).item() == 1.0
        space.atomic("add", np.full(2, start + 4), tiny)
        assert space.load(lanes(start + 4), 4).view(np.float32).item() == left


@pytest.mark.parametrize("lanes_at_once", [1, 2])
def test_a_subnormal_flushes_at_every_step_of_a_global_add(memory: GlobalMemory, lanes_at_once: int) -> None:
    least = np.finfo(np.float32).tiny
    base = memory.alloc(8)
    for start, adds, left in ((1e-40, (least, 0), least), (1.5 * least, (-least, least), least)):
        memory.store(lanes(base), np.array([start], np.float32))
        values = np.array(adds, np.float32)
        for step in range(0, 2, lanes_at_once):
            memory.atomic("add", np.full(lanes_at_once, base), values[step : step + lanes_at_once])
        assert memory.load(lanes(base), 4).view(np.float32).item() == left


def test_atomics_are_checked_like_accesses(memory: GlobalMemory) -> None:
    base = memory.alloc(64)
    with pytest.raises(MemoryFault, match="nobody has"):
        memory.atomic("add", lanes(base), np.ones(1, np.uint32))
    memory.fill(base, 64, 0)
    assert memory.atomic("add", lanes(base, base), np.ones(2, np.uint32)).tolist() == [0, 1]
    with pytest.raises(MemoryFault, match="must be 4-byte aligned"):
        memory.atomic("add", lanes(base + 2), np.ones(1, np.uint32))
    with pytest.raises(MemoryFault, match="past the end"):
        memory.atomic("add", lanes(base + 64), np.ones(1, np.uint32))
    with pytest.raises(Unsupported, match="'mul' is not modelled"):
        memory.atomic("mul", lanes(base), np.ones(1, np.uint32))
