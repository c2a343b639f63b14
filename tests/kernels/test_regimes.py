"""The two throughput regimes keep their word: bytes in flight per SM, and CTAs that really share an SM."""

from __future__ import annotations

import pytest

from kernels.engine import ENGINES, ConfigError, CopyConfig
from kernels.lsu.copy import LsuCopyConfig
from smfree.cuda import Capabilities, Device, Kernel

TILES = (128, 512, 1024, 4096, 16384, 65536)
IN_FLIGHT = (4096, 8192, 16384, 32768, 65536)
CUDA = ("lsu", "cp.async", "tma.bulk", "tma.tensor")
SPECS = ("emu:a100", "emu:h100")


def configurations(name: str, capabilities: Capabilities) -> list[tuple[int, CopyConfig]]:
    """Every (bytes in flight, configuration) of an engine that is possible."""
    found = []
    for tile_bytes in TILES:
        for wanted in IN_FLIGHT:
            for threads in (None, 32, 128, 256):
                try:
                    config = ENGINES[name].throughput_config(
                        capabilities, tile_bytes, bytes_in_flight_per_sm=wanted, threads=threads
                    )
                except ConfigError:
                    continue
                assert threads is None or config.threads == threads
                assert config.tile_bytes == tile_bytes
                found.append((wanted, config))
    return found


def resident(device: Device, config: CopyConfig) -> int:
    kernel: Kernel = device.compile(config.source).kernel()
    shared = kernel.module.image.metadata.get("shared", config.shared_bytes)
    return kernel.occupancy(config.threads, int(shared))  # type: ignore[call-overload]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", list(ENGINES))
def test_matched_regime_has_exactly_the_bytes_in_flight(name: str, spec: str) -> None:
    with Device.open(spec) as device:
        if ENGINES[name].unavailable(device.capabilities):
            with pytest.raises(ConfigError, match="needs the TMA"):
                ENGINES[name].throughput_config(device.capabilities, 4096, bytes_in_flight_per_sm=4096)
            return
        found = configurations(name, device.capabilities)
        for wanted, config in found:
            assert config.bytes_in_flight_per_cta * config.ctas_per_sm == wanted
        assert {wanted for wanted, _ in found} == set(IN_FLIGHT)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", CUDA)
def test_matched_regime_lets_no_sm_hold_more_ctas_than_meant(name: str, spec: str) -> None:
    with Device.open(spec) as device:
        if ENGINES[name].unavailable(device.capabilities):
            pytest.skip("no TMA on this device")
        for _, config in configurations(name, device.capabilities)[::5]:
            assert resident(device, config) == config.ctas_per_sm, config


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", list(ENGINES))
def test_at_its_best_all_ctas_are_resident(name: str, spec: str) -> None:
    with Device.open(spec) as device:
        if ENGINES[name].unavailable(device.capabilities):
            pytest.skip("no TMA on this device")
        for tile_bytes in TILES:
            config = ENGINES[name].throughput_config(device.capabilities, tile_bytes)
            assert resident(device, config) >= config.ctas_per_sm, config


@pytest.mark.parametrize(
    ("tile_bytes", "unroll", "in_flight"),
    [(16384, 4, 8192), (8192, 4, 8192), (4096, 4, 2048), (1024, 4, 1024)],
)
def test_lsu_copy_counts_only_whole_batches_as_in_flight(
    tile_bytes: int, unroll: int, in_flight: int
) -> None:
    assert LsuCopyConfig(tile_bytes, 128, 16, unroll).bytes_in_flight_per_cta == in_flight


@pytest.mark.parametrize(
    ("name", "tile_bytes", "wanted", "threads", "reason"),
    [
        ("tma.bulk", 128, 65536, 32, r"out of reach with tiles of 128: at most 4 stages .* hold 16384"),
        ("tma.tensor", 65536, 4096, 32, r"multiple of the tile, which is in flight as a whole"),
        ("cp.async", 16384, 4096, 128, r"multiple of the tile, which is in flight as a whole"),
        ("lsu", 128, 8192, 32, r"a CTA has at most its tile in flight, .* holds at most 4096"),
        ("triton.pointer", 16384, 4096, 128, r"1 to \d+ tiles, of which each CTA loads one"),
    ],
)
def test_an_impossible_regime_gives_its_reason(
    name: str, tile_bytes: int, wanted: int, threads: int, reason: str
) -> None:
    with Device.open("emu:h100") as device, pytest.raises(ConfigError, match=reason):
        ENGINES[name].throughput_config(
            device.capabilities, tile_bytes, bytes_in_flight_per_sm=wanted, threads=threads
        )
