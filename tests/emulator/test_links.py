"""Links of a node: ports, packets, latencies, who shares what, and what is counted."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import numpy as np
import pytest

from smfree.emulator.clock import Clock
from smfree.emulator.crossing import Asked, Crossing
from smfree.emulator.exec.launch import Launch, LaunchResult, run
from smfree.emulator.links import HOST, Links, Path
from smfree.emulator.node import Node
from smfree.emulator.profile import Profile, load
from tests.emulator.driver_kit import ok, open_driver, open_node
from tests.emulator.exec_kit import cuda_kernel, kernel, repository_kernel

MB = 1 << 20
NOW = np.zeros(1)


def arrival(
    links: Links, src: int, dst: int, nbytes: int, packets: int | None = None, at: float = 0.0
) -> float:
    count = None if packets is None else np.array([float(packets)])
    return float(links.send(src, dst, np.array([at]), np.array([nbytes]), packets=count)[0])


def links(count: int = 2, *, clocked: bool = True) -> Links:
    return Links([load("h100")] * count, clocked=clocked)


def test_a_transfer_takes_its_packets_and_one_latency() -> None:
    spec = load("h100").link
    alone = arrival(links(), 0, 1, 128, packets=1)
    assert alone == pytest.approx((128 + spec.header_bytes) / spec.gbps + spec.latency_ns)
    # 128-byte packets carry a smaller share than the 256 bytes of a copy engine.
    lines, copied = (arrival(links(), 0, 1, MB, packets=p) for p in (MB // 128, None))
    assert MB / (lines - spec.latency_ns) == pytest.approx(450 * 128 / 162, rel=1e-6)
    assert MB / copied == pytest.approx(450 * 256 / 290, rel=1e-6)  # its start-up holds the latency


def test_two_senders_share_the_receivers_port() -> None:
    node = links(3)
    one = arrival(node, 0, 2, MB)
    two = arrival(node, 1, 2, MB)
    assert two == pytest.approx(2 * one, rel=0.02)


def test_directions_and_pairs_do_not_share() -> None:
    node = links(4)
    times = [arrival(node, src, dst, MB) for src, dst in ((0, 1), (1, 0), (2, 3), (3, 2))]
    assert times == pytest.approx([times[0]] * 4)
    assert arrival(node, 0, 3, MB) == pytest.approx(2 * times[0], rel=0.02)  # the sender's port is taken


@pytest.mark.parametrize(("answer", "lost"), [(True, 1.0), (False, 1.3)], ids=["answers", "unasked"])
def test_what_was_asked_for_keeps_no_other_reader_waiting(answer: bool, lost: float) -> None:
    """Each of four GPUs has asked the next, the one after it and so on, all at once: every port is busy until
    the end. What comes unasked piles up at the first receiver, and the others' bytes behind it."""
    node, pieces = links(4), 32
    t, nbytes = np.zeros(pieces), np.full(pieces, MB / pieces)
    last = max(
        float(
            node.carry((reader + turn) % 4, reader, t, nbytes, packets=nbytes / 128, answer=answer)[-1].max()
        )
        for reader in range(4)
        for turn in (1, 2, 3)
    )
    spec = load("h100").link
    full = 3 * MB / 128 * (128 + spec.header_bytes) / spec.gbps + spec.latency_ns
    assert last == pytest.approx(full, rel=0.01) if answer else last > lost * full


def test_a_request_waits_for_no_data_but_takes_its_share_of_the_port() -> None:
    profile = load("h100")

    def load_ns(traffic: int) -> tuple[float, float]:
        """When GPU 0 has a line of GPU 1, to which GPU 2 sends ``traffic`` bytes; when those are there."""
        node, owner = links(3), SimpleNamespace(ordinal=1, clock=Clock(profile))
        crossing = Crossing(Clock(profile), node, 0, owner, lambda cycles: cycles, lambda ns: ns)
        if traffic:
            arrival(node, 2, 1, traffic, packets=traffic // 128)
        line = np.full(1, 128.0)
        done = crossing.load(np.zeros(1, np.int64), NOW, Asked(128, line, line / 128, NOW))
        return float(done[0]), arrival(node, 2, 1, 0, packets=0)

    (alone, _), (busy, after) = load_ns(0), load_ns(MB)
    spec = profile.link
    assert busy == alone
    assert after - spec.latency_ns == pytest.approx(
        (MB / 128 * (128 + spec.header_bytes) + spec.header_bytes) / spec.gbps, rel=1e-6
    )


@pytest.mark.parametrize("later_ns", [5_000.0, 12_345.678, 1e9 + 17.3])
def test_the_same_traffic_takes_as_long_whenever_it_begins(later_ns: float) -> None:
    """Two GPUs send to a third, out of order, in calls that meet in the bins of its port's calendar."""
    node = links(3)

    def burst(begin: float) -> list[float]:
        times = [(0, 40.0), (1, 3.0), (0, 55.0), (1, 21.0), (0, 80.0), (1, 76.0)]
        return [arrival(node, src, 2, 9000, packets=70, at=begin + at) - begin for src, at in times]

    first = burst(1000.0)
    assert burst(1000.0 + later_ns) == pytest.approx(first, abs=1e-3)


def test_a_request_may_use_time_that_was_left_free() -> None:
    node = links()
    arrival(node, 0, 1, MB, at=1e9)
    assert arrival(node, 0, 1, 128, packets=1, at=1e9 - 5000) < 1e9 - 5000 + 400


def test_different_gpus_have_the_slower_ones_link() -> None:
    mixed = Links([load("a100"), load("h100")])
    assert mixed.gbps(0, 1) == mixed.gbps(1, 0) == 300


def test_paths_and_lookahead() -> None:
    node = links()
    assert (node.path(0, 1), node.path(0, 0), node.path(HOST, 1)) == (Path.NVLINK, Path.SAME, Path.PCIE)
    assert node.lookahead_ns == min(load("h100").link.latency_ns, load("h100").link.pcie_latency_ns)
    assert arrival(node, 1, 1, MB, at=5.0) == 5.0


def test_the_host_by_kind_of_memory_and_socket() -> None:
    node, host = links(8), load("h100").host
    assert node.numa_node == (0, 0, 0, 0, 1, 1, 1, 1)
    assert node.gbps(HOST, 0) == node.gbps(0, HOST, numa_node=0) == host.pcie_pinned_gbps
    assert node.gbps(HOST, 0, pinned=False) == host.pcie_pageable_gbps
    assert node.gbps(HOST, 0, numa_node=1) == 0.75 * host.pcie_pinned_gbps == node.gbps(HOST, 7, numa_node=0)
    assert MB / arrival(node, HOST, 0, MB) == pytest.approx(host.pcie_pinned_gbps)


@pytest.mark.parametrize("clocked", [True, False])
def test_traffic_is_counted_with_and_without_a_clock(clocked: bool) -> None:
    node = links(3, clocked=clocked)
    arrival(node, 0, 1, 1000, packets=8)
    arrival(node, HOST, 1, 4096)
    sent, received = node.traffic[0].nvlink, node.traffic[1].nvlink
    assert (sent.sent_bytes, sent.sent_wire_bytes) == (1000, 1000 + 8 * 34)
    assert (received.received_bytes, received.received_wire_bytes) == (1000, 1000 + 8 * 34)
    assert node.traffic[1].pcie.received_bytes == 4096
    assert node.traffic[2].nvlink.received_bytes == node.traffic[0].pcie.sent_bytes == 0


def test_a_multicast_takes_each_port_once() -> None:
    node = links(8)
    nbytes, packets = np.array([float(MB)]), np.array([MB / 128])
    sent, arrivals = node.replicate(0, list(range(8)), NOW, nbytes, packets)
    alone = arrival(links(), 0, 1, MB, packets=MB // 128)
    assert float(sent[0]) == pytest.approx(alone - 342)
    assert [float(a[0]) for a in arrivals] == pytest.approx([alone] * 8)
    back = node.gather(list(range(8)), 1, [NOW] * 8, nbytes, packets)
    assert float(back[0]) < 2.1 * alone  # its own port was busy with what it had received


# ------------------------------------------------------------------------------------------------- kernels


def pair(profile: Profile | str = "h100", count: int = 2) -> Node:
    node = Node([profile] * count, schedule="timed")
    process = node.attach()
    for context in process.contexts.values():
        context.peers.update(range(count))
    return node


def launch(node: Node, k: object, params: bytes, grid: int, block: int, shared: int = 0) -> LaunchResult:
    context = node.processes[0].contexts[0]
    return run(
        node.devices[0],
        k,
        params,
        (grid, 1, 1),
        (block, 1, 1),
        None,
        shared,
        schedule="timed",
        context=context,
    )  # type: ignore[arg-type]


def us(node: Node, result: LaunchResult) -> float:
    return result.cycles / node.devices[0].profile.device.sm_clock_mhz


CHASE = """
.reg .b64 %at;
mov.u64 %at, %rd1;
mov.u32 %r10, 0;
NEXT: ld.global.u64 %at, [%at];
add.u32 %r10, %r10, 1;
setp.lt.u32 %p1, %r10, COUNT;
@%p1 bra NEXT;
"""


@pytest.mark.parametrize(
    ("home", "expected_ns"), [("own", 280 / 1.98), ("peer", 684 + 280 / 1.98), ("host", 650)]
)
def test_dependent_loads_take_the_round_trip(home: str, expected_ns: float) -> None:
    # nvbandwidth's device_to_device_latency_sm, 826 ns, fixed the link's latency with just this chain.
    times = []
    for count in (1, 17):
        node = pair()
        if home == "host":
            found = node.host.allocate(4096, 0)
            where = found.address
            found.bytes.views[8][0] = where
        else:
            memory = node.devices[int(home == "peer")].memory
            where = memory.alloc(4096, owner=node.processes[0])
            memory.write(where, np.array([where], np.uint64))
        body = kernel(CHASE.replace("COUNT", str(count)))
        result = launch(node, body, struct.pack("<QQQI", where, where, 0, 0), 1, 1)
        times.append(us(node, result) * 1e3)
    per_load = (times[1] - times[0]) / 16
    assert per_load == pytest.approx(expected_ns, abs=20)  # four instructions besides


PUSH = r"""
extern "C" __global__ void k(int4* dst, const int4* src, unsigned long long n) {
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < n; i += step)
    dst[i] = src[i];
}
"""


def rate_gbps(grid: int, threads: int, *, pull: bool = False, profile: Profile | str = "h20") -> float:
    """Of a copy between the memories of device 0 and 1 by threads of device 0, 16 bytes in flight each."""
    node = pair(profile)
    near, far = (device.memory for device in node.devices)
    nbytes = grid * threads * 16 * 24
    source, target = (far, near) if pull else (near, far)
    src, dst = (memory.alloc(nbytes, owner=node.processes[0]) for memory in (source, target))
    source.fill(src, nbytes, 1)
    result = launch(node, cuda_kernel(PUSH), struct.pack("<QQQ", dst, src, nbytes // 16), grid, threads)
    assert result.counters.peer_store_bytes + result.counters.peer_load_bytes == nbytes
    return nbytes / us(node, result) / 1e3


def test_bytes_in_flight_decide_how_many_sms_fill_the_link() -> None:
    # Rows h20-sm-reg (37 GB/s per SM, 1024 threads), nvlink-sms-reg (76 SMs); see docs/emulator.md.
    many, few = rate_gbps(1, 1024), rate_gbps(1, 128)
    assert 37 < many < 37 * 1.25
    assert few == pytest.approx(many / 8, rel=0.15)
    full = rate_gbps(78, 1024)
    assert full == pytest.approx(450 * 128 / 162, rel=0.05)
    assert 8 <= full / many <= 10 and 50 < full / few < 76


def test_a_pull_waits_for_the_round_trip() -> None:
    assert rate_gbps(1, 1024, pull=True) < 0.5 * rate_gbps(1, 1024)


def test_the_tma_pushes_by_bytes_in_flight() -> None:
    # Rows nvlink-sms-tma (15 SMs for about 355 GB/s) and h20-sm-tma (43 GB/s per SM).
    one_sm = load("h20").replace("device.num_sms", 1)
    rates = []
    for ctas, stages in ((1, 2), (2, 4)):
        node = pair(one_sm)
        nbytes = ctas * 16384 * stages * 12
        src, dst = (d.memory.alloc(nbytes, owner=node.processes[0]) for d in node.devices)
        node.devices[0].memory.fill(src, nbytes, 1)
        options = ("-DTILE_BYTES=16384", f"-DNUM_STAGES={stages}", "-DTHREADS=32")
        body = repository_kernel("tma/bulk.cu", *options)
        result = launch(node, body, struct.pack("<QQQ", dst, src, nbytes), ctas, 32, 16384 * stages)
        rates.append(nbytes / us(node, result) / 1e3)
    assert 355 / rates[0] == pytest.approx(15, abs=1)
    assert rates[1] == pytest.approx(43, rel=0.1)


def test_peer_traffic_passes_the_owners_dram() -> None:
    node = pair()
    src, dst = (d.memory.alloc(1 << 16, owner=node.processes[0]) for d in node.devices)
    node.devices[0].memory.fill(src, 1 << 16, 1)
    counters = launch(node, cuda_kernel(PUSH), struct.pack("<QQQ", dst, src, 1 << 12), 4, 1024).counters
    assert (counters.dram_read_bytes, counters.dram_write_bytes) == (1 << 16, 0)
    assert node.devices[1].counters.dram_write_bytes == 1 << 16


# -------------------------------------------------------------------------------------------- copy engines


def copy_gbps(
    copies: list[tuple[int, int]], *, access: bool = True, count: int = 3
) -> tuple[list[float], Node]:
    """GB/s of copies of 64 MB between devices that start together, (source, target) each."""
    driver = open_driver(*["h100"] * count, executor=Launch)
    contexts, nbytes, marks = open_node(driver), 64 * MB, []
    for source, target in copies:
        ok(driver.cuCtxSetCurrent(contexts[target]))
        dst = ok(driver.cuMemAlloc(nbytes))
        ok(driver.cuCtxSetCurrent(contexts[source]))
        if access:
            driver.cuCtxEnablePeerAccess(contexts[target], 0)
        src, stream = ok(driver.cuMemAlloc(nbytes)), ok(driver.cuStreamCreate(1))
        first, last = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
        ok(driver.cuEventRecord(first, stream))
        ok(driver.cuMemcpyDtoDAsync(dst, src, nbytes, stream), driver)
        ok(driver.cuEventRecord(last, stream))
        marks.append((source, first, last))
    rates = []
    for source, first, last in marks:
        ok(driver.cuCtxSetCurrent(contexts[source]))
        ok(driver.cuEventSynchronize(last), driver)
        rates.append(nbytes / (ok(driver.cuEventElapsedTime(first, last)) * 1e6))
    return rates, driver.node


def test_a_copy_between_devices_runs_at_the_links_rate() -> None:
    ((rate,), node) = copy_gbps([(0, 1)])
    assert rate == pytest.approx(450 * 256 / 290, rel=0.03)
    sent, received = node.links.traffic[0].nvlink, node.links.traffic[1].nvlink
    assert sent.sent_bytes == received.received_bytes == 64 * MB
    assert node.devices[0].counters.copy_engine_read_bytes == 64 * MB
    assert node.devices[1].counters.copy_engine_write_bytes == 64 * MB


def test_copies_to_one_device_share_its_port() -> None:
    alone = 450 * 256 / 290
    together, _ = copy_gbps([(0, 2), (1, 2)])
    assert together == pytest.approx([alone / 2] * 2, rel=0.06)
    apart, _ = copy_gbps([(0, 2), (1, 0)])
    assert apart == pytest.approx([alone] * 2, rel=0.03)


def test_a_copy_without_peer_access_goes_through_the_host() -> None:
    """D15."""
    ((rate,), node) = copy_gbps([(0, 1)], access=False)
    assert rate == pytest.approx(load("h100").host.pcie_pinned_gbps / 2, rel=0.03)
    assert node.links.traffic[0].nvlink.sent_bytes == 0
    assert node.links.traffic[0].pcie.sent_bytes == node.links.traffic[1].pcie.received_bytes == 64 * MB


def test_a_process_whose_clock_is_behind_does_not_wait_for_one_that_is_ahead() -> None:
    """Host clocks of two processes know nothing of each other: the port was free then."""
    node, begin, ahead_ns = links(), 10_000.0, 50_000.0
    alone = arrival(links(), 0, 1, 4096, at=begin) - begin
    for turn in range(40):  # a port in use, up to 2 ms later
        arrival(node, 0, 1, 4096, at=begin + ahead_ns * turn)
    behind = arrival(node, 0, 1, 4096, at=2 * begin) - 2 * begin
    assert behind == pytest.approx(alone, abs=1)
