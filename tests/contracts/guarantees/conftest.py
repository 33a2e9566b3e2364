"""In which order the tests of guarantees run."""

from __future__ import annotations

from pathlib import Path

import pytest


def op_of(item: pytest.Item) -> str:
    return (
        str(item.callspec.params.get("op", ""))
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else ""
    )


@pytest.hookimpl(trylast=True)  # the tests of other marks are gone by then
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests of an op one after the other: they share its problems, of which no others are kept."""
    here = str(Path(__file__).parent)
    places = [i for i, item in enumerate(items) if str(item.path).startswith(here)]
    for i, item in zip(places, sorted((items[i] for i in places), key=op_of), strict=True):
        items[i] = item
