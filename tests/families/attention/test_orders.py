"""The order in which persistent programs of the Hopper kernels take tiles."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from cases import H200, required

import triplan as tp
from triplan.backends.triton.attention import tma, wgmma_shared_kernels
from triplan.testing import check_plan

SMS = 132


@pytest.fixture
def busiest(monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Work of the busiest program, of the mean: the kernels' own ``numbered_tile``, run as Python."""
    stub = SimpleNamespace(num_programs=lambda _: SMS, minimum=min, where=lambda c, x, y: x if c else y)
    monkeypatch.setattr(wgmma_shared_kernels, "gl", stub)

    def found(tiles: int, heads: int, section: int, turning: int) -> float:
        total, work, seen = tiles * heads, [0.0] * SMS, set()
        for index in range(total):
            tile, head = wgmma_shared_kernels.numbered_tile.fn(index, tiles, heads, section, turning)
            seen.add((tile, head))
            work[index % SMS] += tiles - tile + tma.OVERHEAD
        assert seen == {(t, h) for t in range(tiles) for h in range(heads)}
        return max(work) / (sum(work) / SMS)

    return found


@pytest.mark.parametrize(
    ("tiles", "heads", "fitting"),
    [
        pytest.param(32, 128, 16, id="many heads"),
        pytest.param(32, 32, 4, id="grouped"),
        pytest.param(128, 32, 4, id="long"),
        pytest.param(32, 8, 16, id="few heads"),
        pytest.param(64, 8, 2, id="few and grouped"),
        pytest.param(17, 23, 8, id="odd"),
        pytest.param(8, 384, 128, id="short"),
    ],
)
def test_no_program_has_much_more_work_than_others(
    tiles: int, heads: int, fitting: int, busiest: Callable[..., float]
) -> None:
    """At most 5 % above the mean, and an eighth of the longest tile. Plain sections reach 1.9 times the mean."""
    section, turning = tma._balanced(tiles, heads, fitting, SMS)
    mean = heads * tiles * ((tiles + 1) / 2 + tma.OVERHEAD) / SMS
    assert busiest(tiles, heads, section, turning) <= 1.05 + tiles / 8 / mean


def test_plain_sections_of_grouped_heads_are_uneven(busiest: Callable[..., float]) -> None:
    assert busiest(32, 32, 4, 0) > 1.7
    assert tma._balanced(32, 32, 4, SMS) == (1, 1)


@pytest.mark.parametrize(("tiles", "heads", "fitting"), [(32, 128, 16), (32, 128, 32), (128, 32, 4), (8, 384, 128)])
def test_sections_that_fit_are_not_all_full(
    tiles: int, heads: int, fitting: int, busiest: Callable[..., float]
) -> None:
    """Some smaller ones leave less to the busiest program, and its operands fit into the cache as well."""
    section, turning = tma._balanced(tiles, heads, fitting, SMS)
    assert fitting / 2 <= section <= fitting
    assert busiest(tiles, heads, section, turning) < busiest(tiles, heads, fitting, 0)


def test_equal_tiles_keep_their_sections() -> None:
    found = tma.order_of(32, 32, 4, SMS, causal=False)
    assert {name: arg.value for name, arg in found.items()} == {"section": 4, "turning": 0}


@pytest.mark.gpu
@pytest.mark.skipif("tp.Target.current().arch is not tp.ArchSku.SM90A")
@pytest.mark.parametrize("op", ["attention", "attention_backward"])
def test_tiles_in_turns_on_the_gpu(op: str) -> None:
    sizes: dict[str, Any] = {"batch": 1, "heads": 24, "key_heads": 12, "queries": 1900, "keys": 1900}
    desc = tp.descriptor_types()[op](**sizes, head_dim=64, element="bf16", causal=True)
    assert tma._balanced(15, 24, 128, SMS)[1] == tma._balanced(15, 12, 64, SMS)[1] == 1
    check_plan(required(desc, "wgmma", tp.Target.current()), runs=3)


@pytest.mark.parametrize(("heads", "group", "queries", "keys"), [(1, 1, 2**27, 8), (2**16, 2**16, 3, 1)])
def test_tiles_of_a_section_fit_into_32_bits(heads: int, group: int, queries: int, keys: int) -> None:
    """Though more heads would fit into the cache than there are."""
    desc = tp.AttentionDescriptor(
        batch=1, queries=queries, keys=keys, heads=heads, key_heads=heads // group, head_dim=64, element="f16"
    )
    args = required(desc, "wgmma", H200).launches[-1].args
    assert 0 < args["section"].value * args["tiles"].value < 2**31
