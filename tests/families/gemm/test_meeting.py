"""Programs of long products that wait for one another: when, and that their counters end where they should."""

from __future__ import annotations

import pytest
import torch

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan.backends.runtime import counters
from triplan.backends.triton.common.meeting_kernels import EPOCH
from triplan.backends.triton.gemm.rings import MEETING_K, meeting_rounds

#: Counters that loaded kernels go on to use when a test is over.
KEPT: list[dict[int, torch.Tensor]] = []


@pytest.mark.parametrize(
    ("items", "programs", "k", "rounds"),
    [
        (263, 132, MEETING_K, 0),  # no second round of all
        (264, 132, MEETING_K, 2),
        (395, 132, MEETING_K, 2),
        (2640, 132, MEETING_K - 1, 0),  # short tiles
        (EPOCH.value, 132, MEETING_K, 0),  # more than a counter counts
    ],
)
def test_rounds(items: int, programs: int, k: int, rounds: int) -> None:
    assert meeting_rounds(items, programs, k) == rounds


@pytest.mark.gpu
@pytest.mark.skipif("tp.Target.current().arch is not tp.ArchSku.SM90A")
def test_two_streams_at_once() -> None:
    """51 products that hold each other's multiprocessors, and share a counter, have the bits of one alone."""
    g = torch.Generator(device="cuda").manual_seed(1)
    a, b = (torch.randn(4096, 4096, generator=g, device="cuda").bfloat16() for _ in range(2))
    plan = tp.plan(tp.GemmDescriptor(m=4096, n=4096, k=4096, element="bf16"), kernel="wgmma")
    alone = torch.empty_like(a)
    plan.run(tp.GemmArgs(a=a, b=b, c=alone))
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = [[torch.full_like(a, float("nan")) for _ in range(17)] for _ in streams]
    torch.cuda.synchronize()
    for turn in range(17):
        for stream, outs in zip(streams, found, strict=True):
            with torch.cuda.stream(stream):
                plan.run(tp.GemmArgs(a=a, b=b, c=outs[turn]))
    torch.cuda.synchronize()
    assert all(torch.equal(out, alone) for outs in found for out in outs)
    values = counters._memory[torch.cuda.current_device()].view(torch.int32)
    assert (values % EPOCH.value == 0).all()
    assert values.any()


@pytest.mark.gpu
@pytest.mark.skipif("tp.Target.current().arch is not tp.ArchSku.SM90A")
def test_first_loaded_while_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters' memory is taken beside the capture: it is no graph's."""
    memory: dict[int, torch.Tensor] = {}
    KEPT.append(memory)
    monkeypatch.setattr(counters, "_memory", memory)
    g = torch.Generator(device="cuda").manual_seed(2)
    a = torch.randn(4096, 2304, generator=g, device="cuda").bfloat16()
    b = torch.randn(2304, 4096, generator=g, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = F.mm(a, b)
    for _ in range(3):
        c.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    assert (memory[torch.cuda.current_device()].view(torch.int32) % EPOCH.value == 0).all()
    torch.testing.assert_close(c, torch.mm(a, b), rtol=0.02, atol=0.5)
