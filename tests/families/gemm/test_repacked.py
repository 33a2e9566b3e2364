"""Products of f32 on copies that are read faster: what is copied, and the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cases import H200, INTERPRETER, pinned, required
from cases.gemm import COLUMN, LOOSE_COLUMN, LOOSE_ROW, backward, batched_grid, check, grid

import triplan as tp

SQUARE = tp.GemmDescriptor(m=2048, n=2048, k=2048, element="f32")
A100 = tp.Target.preset("a100")
BOTH: dict[str, Any] = {"a": COLUMN, "b": COLUMN}


@pytest.mark.parametrize(
    ("math", "change", "copies"),
    [
        (None, {"layouts": {"b": COLUMN}}, "b"),
        (None, {"layouts": BOTH}, "b"),
        ("tf32", {}, "b"),
        ("tf32", {"layouts": BOTH}, "a"),
        ("tf32", {"layouts": {"a": COLUMN}}, "ab"),
        ("tf32", {"k": 2047, "layouts": {"a": LOOSE_ROW, "b": LOOSE_COLUMN}}, "ab"),
    ],
)
def test_what_is_copied(math: str | None, change: dict[str, Any], copies: str) -> None:
    """To a row-major B for FMAs, to rows of k for wgmma: of 2048 elements, also where k is 2047."""
    plan = required(SQUARE.replace(math=math, **change), "repacked", H200)
    names = [x.kernel.__name__ for x in plan.launches]
    assert names == ["matrix_copy_kernel"] * len(copies) + ["tiles_kernel"]
    assert [x.args["source"].operand for x in plan.launches[:-1]] == list(copies)
    assert plan.workspace_size() == 4 * 2048 * 2048 * len(copies)


def test_where_it_is_chosen() -> None:
    for desc, target in ((SQUARE.replace(layouts={"b": COLUMN}), A100), (SQUARE.replace(math="tf32"), H200)):
        assert tp.plan(desc, target=target).sku().kernel == "repacked"
        none = tp.PlanPreference(max_workspace_bytes=0)
        assert tp.plan(desc, preference=none, target=target).sku().kernel == "tiles"
    assert tp.plan(SQUARE, target=A100).sku().kernel == "tiles"
    for desc in (SQUARE, SQUARE.replace(math="tf32x3"), SQUARE.replace(math="tf32", layouts={"b": COLUMN})):
        with pytest.raises(tp.Unsupported, match="as they are read the fastest"):
            required(desc, "repacked", H200)
    with pytest.raises(tp.Unsupported, match="sm80"):
        required(SQUARE.replace(math="tf32"), "repacked", A100)
    empty = required(SQUARE.replace(m=0, layouts={"b": COLUMN}), "repacked", H200)
    assert (empty.launches, empty.workspace_size()) == ((), 0)


def test_partial_sums_lie_behind_the_copies() -> None:
    """And the gradient of A takes it, as its product reads B by columns."""
    desc = SQUARE.replace(m=64, n=64, k=1 << 20, layouts={"b": COLUMN})
    plan = required(desc, "repacked", H200)
    copy, split, _ = plan.launches
    assert [x.kernel.__name__ for x in plan.launches] == ["matrix_copy_kernel", "split_kernel", "pieces_kernel"]
    assert copy.args["out"].offset == 0
    assert split.args["b"].offset == 0
    assert split.args["partial"].offset == 4 * 64 * desc.k < plan.workspace_size()
    names = [x.kernel.__name__ for x in tp.plan(backward(4096, 4096, 4096, "f32", (1, 0, 0)), target=A100).launches]
    assert names == ["matrix_copy_kernel", "tiles_kernel"]


def problems(m: int, n: int, k: int) -> Iterator[tp.Descriptor]:
    for math in (None, "tf32"):
        for desc in (*grid("f32", m, n, k), *batched_grid("f32", 2, m, n, k)):
            yield desc.replace(math=math)


def every(m: int, n: int, k: int, target: tp.Target) -> int:
    """Elements of the problems that the entry takes, compared with the oracle."""
    found = (pinned(desc, "repacked", target) for desc in problems(m, n, k))
    return sum(check(plan, turn) for turn, plan in enumerate(found) if plan is not None)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 203, 512, 8191])
def test_every_layout_on_the_gpu(k: int) -> None:
    assert every(136, 264, k, tp.Target.current()) > 0
    assert every(129, 257, k, tp.Target.current()) > 0


@pytest.mark.interpret
@pytest.mark.parametrize("k", [1, 35])
def test_every_layout_interpreted(k: int) -> None:
    assert every(17, 33, k, INTERPRETER) > 0
