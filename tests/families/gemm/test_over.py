"""Products that are added to a matrix where it lies: c is c0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CPU, places, required
from proofs import target

import triplan as tp

SIZES = {"cpu": [(5, 8, 7)], "interpret": [(5, 136, 40)], "gpu": [(5, 136, 40), (300, 1000, 1000), (4099, 2056, 64)]}


@pytest.mark.parametrize("lead", [(), (2,)], ids=["one", "batch"])
@pytest.mark.parametrize(("where", "entry"), places("tiles", "tiles_invariant", "split_k"))
def test_adds_in_place(where: str, entry: str | None, lead: tuple[int, ...]) -> None:
    """To the bits of the same product with a c of its own; of lines with gaps, and of a batch."""
    device = target(where).device_type
    g = torch.Generator().manual_seed(0)

    def x(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).half().to(device)

    for m, n, k in SIZES[where]:
        a, b, wide, bias = x(*lead, m, k), x(*lead, k, n), x(*lead, m, 2 * n), x(n)
        c0 = wide[..., :n]
        args: dict[str, Any] = {"a": a, "b": b, "c0": c0, "bias": bias, "alpha": 0.5, "beta": -2.0}
        separate = tp.GemmArgs(**args, c=torch.empty_like(wide)[..., :n])
        kind = tp.BatchedGemmDescriptor if lead else tp.GemmDescriptor
        plan = required(kind.from_args(separate, epilogue="bias_relu"), entry, target(where))
        workspace = tp.Workspace.allocate(plan)
        plan.run(plan.args_type(**args, c=separate.c), workspace)
        beside, version = wide[..., n:].clone(), wide._version
        plan.run(plan.args_type(**args, c=c0), workspace)
        assert torch.equal(c0, separate.c)
        assert torch.equal(wide[..., n:], beside)
        assert wide._version > version


def test_other_overlaps_are_refused() -> None:
    memory = torch.zeros(200, dtype=torch.float32)
    a, b, square = torch.ones(4, 3), torch.ones(3, 4), memory[:16].view(4, 4)
    strided = dict.fromkeys(("a", "b", "c", "c0"), "strided")
    desc = tp.GemmDescriptor(m=4, n=4, k=3, element="f32", reads_c0=True, saves_pre=True, layouts=strided)
    plan, pre = tp.plan(desc, target=CPU), torch.empty(4, 4)
    assert plan.can_implement(tp.GemmArgs(a=a, b=b, c=square, c0=square.view(4, 4), pre=pre))
    for change in (
        {"c": memory[4:20].view(4, 4)},
        {"c": square.t()},
        {"c": memory[:20].view(4, 5)[:, :4]},
        {"a": square[:, :3]},
        {"pre": square},
    ):
        named: dict[str, Any] = {"a": a, "b": b, "c": square, "c0": square, "pre": pre, **change}
        refused = plan.can_implement(tp.GemmArgs(**named))
        assert not refused
        assert "shares memory" in refused.reason


def test_a_call_like_the_last_one_needs_no_other_check() -> None:
    desc = tp.GemmDescriptor(m=4, n=4, k=3, element="f32", reads_c0=True)
    plan, a, b = tp.plan(desc, target=CPU), torch.ones(4, 3), torch.ones(3, 4)
    c, d = torch.zeros(4, 4), torch.zeros(4, 4)
    plan.run(tp.GemmArgs(a=a, b=b, c=c, c0=c))
    replay = plan._replay
    assert replay is not None
    plan.run(tp.GemmArgs(a=a, b=b, c=d, c0=d))
    assert plan._replay is replay
    assert replay.match(tp.GemmArgs(a=a, b=b, c=c, c0=d), None) is None
    assert replay.match(tp.GemmArgs(a=a, b=b, c=a, c0=a), None) is None
    plan.run(tp.GemmArgs(a=a, b=b, c=c, c0=d))
    assert torch.equal(c, torch.full((4, 4), 6.0))
