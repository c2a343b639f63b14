"""Loads the plugin for a bare checkout. Where smfree is installed, its entry point has the same name and
nothing is loaded twice. pytester is for tests/measure; pytest wants it named here, and options too."""

import pytest

pytest_plugins = ["smfree.measure.plugin", "pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-product",
        action="store_true",
        help="tests of kernels: every combination of their axes, not only every pair",
    )
