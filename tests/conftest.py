"""The options of these tests. What else they share is in ``running``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix",
        choices=("few", "cover", "all"),
        default="cover",
        help="binaries to build: one a kernel, those that cover the compile matrix, or all of them",
    )
    parser.addoption("--family", help="only tests of this family: those in its folder, and those of its ops elsewhere")


def pytest_configure(config: pytest.Config) -> None:
    """Imports torch, unless this process only deals tests out to others."""
    if config.option.collectonly or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.import_plugin("running")
