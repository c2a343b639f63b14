"""Profiles: every parameter has a unit and a source, and a wrong file is refused by name."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import resources
from pathlib import Path

import pytest

from smfree.cuda import Device
from smfree.cuda.capabilities import arch_for
from smfree.emulator import profile as profiles
from smfree.emulator.profile import Profile, load, parse
from smfree.emulator.replay import error_table, parameter_table, replay
from tests.kernels.cases import EVERY_ARCH

DOCS = Path(__file__).parents[2] / "docs" / "emulator.md"


def text_of(name: str) -> str:
    return (resources.files("smfree.emulator") / "profiles" / f"{name}.toml").read_text(encoding="utf-8")


@pytest.fixture(params=profiles.names())
def profile(request: pytest.FixtureRequest) -> Profile:
    return load(request.param)


def test_the_profiles_that_come_with_the_package() -> None:
    assert profiles.names() == ["a100", "b200", "h100", "h20", "h200"]


def test_every_kernel_is_compiled_for_the_architecture_of_each_profile(profile: Profile) -> None:
    # tests/kernels compiles all kernels for EVERY_ARCH; an "a" architecture runs on no other device.
    assert arch_for(profile.device.compute_capability) in EVERY_ARCH


def test_every_parameter_has_a_unit_and_a_source(profile: Profile) -> None:
    parameters = list(profile.parameters())
    assert len(parameters) > 40
    for item in parameters:
        assert item.unit and item.source, item.path
        assert profile.get(item.path) == item.value


def test_device_attributes_of_the_h100() -> None:
    device = load("h100").device
    assert device.compute_capability == (9, 0)
    assert device.num_sms == 132
    assert device.shared_bytes_per_sm == 228 * 1024
    assert device.shared_bytes_per_block_optin == 227 * 1024
    assert device.max_warps_per_sm == 64
    assert device.peak_memory_gbps == pytest.approx(3352, rel=1e-3)


def test_the_h200_is_an_h100_with_other_memory() -> None:
    h100, h200 = load("h100").device, load("h200").device
    changed = {f.name for f in fields(h100) if getattr(h100, f.name) != getattr(h200, f.name)}
    assert changed == {"name", "memory_clock_mhz", "memory_bus_bits", "memory_bytes", "l2_bytes"}
    assert h200.peak_memory_gbps == pytest.approx(4917, rel=1e-3)
    assert h200.memory_bytes / 1e9 > 141


def test_the_h20_is_an_h100_with_fewer_sms_and_other_memory() -> None:
    h100, h20 = load("h100"), load("h20")
    changed = {
        f.name for f in fields(h100.device) if getattr(h100.device, f.name) != getattr(h20.device, f.name)
    }
    assert changed == {"name", "num_sms", "memory_clock_mhz", "memory_bus_bits", "memory_bytes", "l2_bytes"}
    assert h20.device.peak_memory_gbps == pytest.approx(4000, rel=1e-3)
    assert h20.link == h100.link and h20.tma == h100.tma
    assert not h20.variants and set(h100.fixed_by) <= set(h20.fixed_by)


def test_a_file_that_extends_another_must_know_its_parameters() -> None:
    with pytest.raises(ValueError, match=r"unknown .'sms'"):
        parse('extends = "h100"\n[device]\nsms = { value = 1, unit = "count", source = "x" }', "mine")


def test_links_of_the_generations() -> None:
    assert [load(name).link.gbps for name in ("a100", "h100", "h200", "b200")] == [300, 450, 450, 900]


def test_device_attributes_of_the_b200() -> None:
    device = load("b200").device
    assert device.compute_capability == (10, 0)
    assert device.num_sms == 148
    assert device.l2_bytes == 126.5 * 2**20
    assert device.shared_bytes_per_sm == 228 * 1024
    assert device.peak_memory_gbps == pytest.approx(7672, rel=1e-3)


@pytest.mark.parametrize(
    ("spec", "arch", "generation", "tma", "wide"),
    [
        ("emu:a100", "sm_80", "ampere", False, False),
        ("emu:h200", "sm_90a", "hopper", True, False),
        ("emu:b200", "sm_100a", "blackwell", True, True),
    ],
)
def test_a_profile_opens_with_the_capabilities_of_its_gpu(
    spec: str, arch: str, generation: str, tma: bool, wide: bool
) -> None:
    with Device.open(spec) as device:
        found = device.capabilities
        assert (found.arch, found.generation) == (arch, generation)
        assert (found.has_tma, found.has_clusters, found.has_wide_access) == (tma, tma, wide)


def test_the_a100_has_no_tma_and_other_shared_memory() -> None:
    profile = load("a100")
    assert not profile.has_tma
    assert profile.device.shared_bytes_per_block_optin == 163 * 1024
    assert profile.device.peak_memory_gbps == pytest.approx(2039, rel=1e-3)


def test_shared_memory_limits_are_consistent(profile: Profile) -> None:
    device = profile.device
    reserved = device.reserved_shared_bytes_per_block
    assert device.shared_bytes_per_block_optin + reserved == device.shared_bytes_per_sm


def test_rows_that_fix_a_parameter_do_not_test_it(profile: Profile) -> None:
    assert profile.tests
    assert not {row.id for row in profile.tests} & set(profile.fixed_by)


def test_rows_named_in_sources_are_listed_as_fixing(profile: Profile) -> None:
    cited = set()
    for item in profile.parameters():
        if not item.source.startswith("assumed"):
            cited |= set(re.findall(r"published:([\w-]+)", item.source))
    assert cited <= set(profile.fixed_by)


def test_replace_scales_one_parameter_and_leaves_the_original() -> None:
    profile = load("h100")
    changed = profile.replace("tma.startup_cycles", factor=1.2)
    assert changed.get("tma.startup_cycles") == pytest.approx(126)
    assert profile.get("tma.startup_cycles") == 105
    assert changed.replace("device.num_sms", 10).device.num_sms == 10


def test_replace_keeps_whole_numbers_whole() -> None:
    sms = load("h100").replace("device.num_sms", factor=1.2).device.num_sms
    assert sms == 158 and isinstance(sms, int)


@pytest.mark.parametrize("path", ["tma.nothing", "nothing.startup_cycles", "tma"])
def test_replace_refuses_an_unknown_parameter(path: str) -> None:
    with pytest.raises(KeyError, match="no parameter"):
        load("h100").replace(path, factor=2.0)


def test_replace_refuses_a_text_and_needs_one_of_value_and_factor() -> None:
    profile = load("h100")
    with pytest.raises(ValueError, match="text"):
        profile.replace("device.name", factor=2.0)
    with pytest.raises(ValueError, match="either value or factor"):
        profile.replace("tma.startup_cycles")
    with pytest.raises(ValueError, match="either value or factor"):
        profile.replace("tma.startup_cycles", 1.0, factor=2.0)


def test_replace_of_a_tma_parameter_without_a_tma_is_refused() -> None:
    with pytest.raises(KeyError, match=r"no parameter 'tma\.startup_cycles'"):
        load("a100").replace("tma.startup_cycles", factor=2.0)


def test_a_variant_changes_only_what_it_names() -> None:
    base, board = load("h100"), load("h100").variant("h800_pcie")
    assert board.device.num_sms == 114
    assert board.device.peak_memory_gbps == pytest.approx(2039, rel=1e-3)
    assert board.tma == base.tma
    assert base.variant("") is base
    with pytest.raises(KeyError, match="no variant 'h999'"):
        base.variant("h999")


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(FileNotFoundError, match="a100, b200, h100, h20, h200"):
        load("h10")


def test_a_profile_loads_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text_of("a100"), encoding="utf-8")
    assert load(path).key == "mine"
    assert load(path).device == load("a100").device


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (r"^num_sms = .*\n", "", "lacks .'num_sms'"),
        (r"^num_sms = .*\n", "num_sms = 132\n", "must be { value, unit, source }"),
        (r"^num_sms = { value = 132", "num_sms = { value = -1", "must not be negative"),
        (r"^num_sms = { value = 132", 'num_sms = { value = "many"', "must be a int, got 'many'"),
        (r"^num_sms = { value = 132", "num_sms = { value = 132.5", "must be a int"),
        (r'^(num_sms = .*source = )".*"', r'\1" "', "has no unit or no source"),
        (r"^num_sms", "number_of_sms", "unknown .'number_of_sms'"),
        (r"^\[lsu\]$", "[lsux]", r"section \[lsu\] is missing"),
        (r"^\[published\]$", "[publishedx]", "unknown sections"),
    ],
)
def test_a_wrong_file_is_refused_by_name(old: str, new: str, message: str) -> None:
    text, count = re.subn(old, new, text_of("h100"), count=1, flags=re.MULTILINE)
    assert count == 1
    with pytest.raises(ValueError, match=message):
        parse(text, "broken")


def test_a_file_without_a_tma_section_has_no_tma() -> None:
    text = re.sub(r"^\[tma\]\n(?:\w.*\n)+", "", text_of("h100"), flags=re.MULTILINE)
    assert parse(text, "h100").tma is None


def test_the_documented_errors_are_those_of_the_model(profile: Profile) -> None:
    page = DOCS.read_text(encoding="utf-8")
    missing = [line for line in error_table(profile) if line not in page]
    assert not missing, "docs/emulator.md is stale; copy the table of `python -m smfree.emulator.replay`"


def test_every_assumption_is_documented(profile: Profile) -> None:
    page = DOCS.read_text(encoding="utf-8")
    missing = [line for line in parameter_table(profile, assumed_only=True) if line not in page]
    assert not missing, "docs/emulator.md is stale; copy the table of `python -m smfree.emulator.replay`"


def test_the_model_is_within_its_stated_error_on_rows_that_did_not_fix_it(profile: Profile) -> None:
    # Full load and single transfers: 10 %. Medium load, where the model knows no loaded latency: 17 %. One SM
    # that pushes, of which the source does not give the bytes in flight: 25 %.
    single = ("bulk_latency", "load_latency", "peer_copy", "peer_flag")
    for done in replay(profile):
        assert abs(done.error) < (0.25 if done.row.kind == "peer_push" else 0.17), done
        if done.row.kind in ("dram_stream", "l2_stream", "peer_store", "peer_bulk", *single):
            assert abs(done.error) < 0.10, done
