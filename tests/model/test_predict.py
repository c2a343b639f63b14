"""``smfree predict``: examples with links often quoted, other links, and what is refused."""

from __future__ import annotations

import re

import pytest

from smfree.cli import main
from smfree.model.collectives import Link, hierarchical, ring, tree
from smfree.model.predict import NODES, Cluster, bytes_of, decimal


def predicted(capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    assert main(["predict", *arguments.split()]) == 0
    return capsys.readouterr().out


def row(text: str, algorithm: str) -> list[str]:
    """The cells of an algorithm's row."""
    (line,) = re.findall(rf"^{algorithm}  +(.*)$", text, re.MULTILINE)
    return re.split(r"  +", line)


def test_gradients_on_64_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    text = predicted(capsys, "--bytes 140e9 --ranks 512")
    assert text.startswith(
        "AllReduce of 140 GB on 512 ranks: 64 nodes of 8; modelled: steps x alpha + bytes / beta"
    )
    assert "beta 450 GB/s, S* 360 KB (NVLink 4: often quoted, not measured)" in text
    assert "beta 45 GB/s, S* 540 KB (400G RDMA: often quoted, not measured)" in text
    assert row(text, "ring") == ["1022", "279.5 GB", "6.222 s", "22.5", "44.9"]
    assert row(text, "hierarchical, ring across")[2] == "1.312 s"
    assert row(text, "tree")[:4] == ["2054", "34.36 MB", "280 GB", "6.271 s"]  # 70 GB in 2054 + 1 - 18 pieces
    assert "\nfastest: hierarchical, ring across\n" in text
    assert (
        "fastest by size: hierarchical, tree across up to 1.218 GB; hierarchical, ring across beyond" in text
    )
    ranks = [int(cell) for cell in re.findall(r"^ +(\d+)  +\d+  .* s ", text, re.MULTILINE)]
    assert ranks == [8 * nodes for nodes in NODES]
    assert "start-ups are" not in text
    assert "\npiece: what a tree sends at a time; algbw: bytes / T; busbw: algbw x 2 (N - 1)/N" in text


def test_a_small_message_in_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    text = predicted(capsys, "--bytes 32e3 --ranks 8")
    assert "on 8 ranks: one node;" in text
    assert text.index("in a node:") < text.index("on other numbers of nodes") < text.index("between nodes:")
    assert row(text, "one-shot") == ["1", "224 KB", "1.298 us", "24.7", "43.2"]
    assert "\nfastest: one-shot\n" in text
    assert "fastest by size (NVLS apart): one-shot up to 68.57 KB; two-shot beyond" in text
    assert (
        "32 KB is below S*: start-ups are 99% of the ring's time; fewer steps or larger messages help" in text
    )


def test_a_large_message_in_a_node_names_who_is_fastest_without_the_switch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = predicted(capsys, "--bytes 134.2e6 --ranks 8")
    assert row(text, "ring")[:3] == ["14", "234.8 MB", "533.1 us"]
    assert "\nfastest: NVLS, where the switch adds; else two-shot\n" in text


def test_links_and_nodes_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    links = "--alpha-us 2 --beta-gbps 100 --across-alpha-us 5 --across-beta-gbps 12.5"
    text = predicted(capsys, f"--bytes 1e6 --ranks 8 --node-size 4 {links}")
    assert "8 ranks: 2 nodes of 4" in text
    assert "in a node:     alpha 2 us, beta 100 GB/s, S* 200 KB (as given)" in text
    assert "between nodes: alpha 5 us, beta 12.5 GB/s, S* 62.5 KB (as given)" in text
    assert row(text, "ring")[2] == "210 us"  # 14 x 5 us + 1.75 MB / 12.5 GB/s
    # 6 x 2 us + 1.5 MB / 100 GB/s inside, 2 x 5 us + 0.25 MB / 12.5 GB/s across
    assert row(text, "hierarchical, ring across")[2] == "57 us"


def test_nodes_of_one_rank_have_nothing_inside(capsys: pytest.CaptureFixture[str]) -> None:
    text = predicted(capsys, "--bytes 1e6 --ranks 16 --node-size 1")
    assert "16 nodes of 1" in text and "hierarchical" not in text


def test_costs_are_those_of_the_model() -> None:
    inside, across = Link(1e-6, 100e9), Link(10e-6, 10e9)
    cluster = Cluster(4, inside, across)
    assert cluster.costs(1e6, 8) == [
        ring(1e6, 8, across),
        tree(1e6, 8, across),
        hierarchical(1e6, 2, 4, inside, across),
        hierarchical(1e6, 2, 4, inside, across, between=tree),
    ]
    assert cluster.costs(1e6, 4)[0] == ring(1e6, 4, inside)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--bytes 1e6 --ranks 12", "ranks fill their nodes of 8 (got 12); use 8, or another size of nodes"),
        ("--bytes 0 --ranks 8", "1 to 1e+18 bytes on 2 to 1048576 ranks (got 0 on 8); change them"),
        ("--bytes 8 --ranks 1", "1 to 1e+18 bytes on 2 to 1048576 ranks (got 8 on 1); change them"),
        ("--bytes 1e30 --ranks 8", "1 to 1e+18 bytes on 2 to 1048576 ranks (got 1e+30 on 8); change them"),
        ("--bytes 8 --ranks 8 --node-size 0", "a node has 1 rank or more (got 0); use 8"),
        (
            "--bytes 8 --ranks 8 --beta-gbps 0",
            "a link has a start-up above 0, and a rate of a byte per second or more",
        ),
    ],
)
def test_what_is_refused(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *arguments.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(1, "1 B"), (999, "999 B"), (1000, "1 KB"), (134.2e6, "134.2 MB"), (2.5e12, "2.5 TB")],
)
def test_bytes_in_powers_of_ten(nbytes: float, text: str) -> None:
    assert decimal(nbytes) == text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("140e9", 140e9),
        ("1.5E+3", 1500),
        ("17B", 17),
        ("64KiB", 65536),
        ("1 MiB", 1 << 20),
        ("1GB", 1e9),
        ("2.5tb", 2.5e12),
    ],
)
def test_a_size_may_have_a_unit(text: str, nbytes: float) -> None:
    assert bytes_of(text) == nbytes


@pytest.mark.parametrize("text", ["lots", "", "-8", "nan", "inf", "64K", "64iB", "GB", "1e9e9", "1,000"])
def test_what_is_no_size_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["predict", f"--bytes={text}", "--ranks", "8"])
    assert ended.value.code == 2
    said = "argument --bytes: a size is a number of bytes from 0 on, also with a unit "
    assert f"{said}(got {text}); write 140e9, 64KiB or 1GB" in capsys.readouterr().err
