"""The stable sort alone, on keys that break sorts, and sums over segments of many chunks, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from addresses import Memory, Placed, no_memory
from cases import INTERPRETER, required
from cases.indexing import build
from samples import SetConstant

import triplan as tp
from triplan.backends.runtime.interpreter import interpret
from triplan.backends.triton.common.copied_kernels import matrix_copy_kernel
from triplan.backends.triton.common.fill_kernels import fill_kernel
from triplan.backends.triton.indexing import sorting, sorting_kernels, turned
from triplan.testing import check_plan

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def problem(count: int, slots: int, width: int = 1, element: str = "f32") -> tp.IndexAddDescriptor:
    return tp.IndexAddDescriptor(src_shape=(count, width), add_dim=0, out_dim_size=slots, element=element)


def made(kind: str, count: int, slots: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(count)
    random = torch.randint(0, slots, (count,), generator=g)
    return {
        "random": random,
        "equal": torch.full((count,), slots - 1),
        "ascending": random.sort().values,
        "descending": random.sort(descending=True).values,
        "mostly dropped": torch.where(torch.rand(count, generator=g) < 0.9, slots, random),
        "two values": torch.where(random % 2 == 0, 0, slots - 1),
    }[kind]


@pytest.mark.parametrize(
    ("count", "slots", "kind"),
    [
        (1, 1, "equal"),
        *((130, 3, kind) for kind in ("random", "equal", "ascending", "descending", "mostly dropped", "two values")),
        *((700, 600, kind) for kind in ("random", "descending", "two values")),
        *((1000, 1 << 19, kind) for kind in ("random", "mostly dropped")),  # several passes of digits
    ],
)
@pytest.mark.parametrize("ranked", [True, False])
def test_the_sort_is_stable(kind: str, ranked: bool, count: int, slots: int, constant: SetConstant) -> None:
    constant(sorting, "RANKED", 8192 if ranked else 0)
    constant(sorting, "MAX_TILES", 4)  # several blocks a tile
    desc = problem(count, slots)
    buffers, view = sorting.buffers(desc), sorting.sorted_view(desc)
    index = made(kind, count, slots)
    launches = [x for x in sorting.sort_launches(desc) if x.kernel is not sorting_kernels.starts_kernel]
    assert len(launches) == (1 if ranked else 3 * view.passes)
    workspace = torch.full((buffers.nbytes,), 0xA5, dtype=torch.uint8)
    values = torch.zeros(count, 1), torch.zeros(slots, 1)
    interpret(launches, tp.IndexAddArgs(index=index, src=values[0], out=values[1]), workspace)

    def read(at: tuple[object, ...]) -> torch.Tensor:
        found = at[view.passes % 2 if not ranked else 0]
        return workspace[found.offset :].view(torch.int32)[:count]  # type: ignore[attr-defined]

    want = index.sort(stable=True)
    assert torch.equal(read(buffers.keys).long(), want.values)
    assert torch.equal(read(buffers.order).long(), want.indices)


@triton.jit
def found_kernel(keys, wanted, out, low, high, steps):  # type: ignore[no-untyped-def]
    """out = the first position in [low, high) whose key is not below ``wanted``; ``keys`` are those from ``low`` on."""
    tl.store(out, sorting_kernels.lower_bound(keys - low, wanted, low, high, steps))


@pytest.mark.parametrize("low", [0, 2**30 - 20, 2**30 + 2**20, 2**31 - 2**16 - 40])
@pytest.mark.parametrize("wanted", [-1, 0, 3, 7, 8])
def test_a_search_among_two_thousand_million_keys(wanted: int, low: int) -> None:
    keys = torch.arange(8, dtype=torch.int32).repeat_interleave(5)
    spans = {"keys": (2**44, 2**44 + 160), "out": (2**45, 2**45 + 4)}
    out: list[int] = []
    memory = Memory(spans, {}, values={"keys": keys.numpy()}, stored=out)
    with no_memory(memory, 0, 1, whole_loops=True):
        found_kernel[(1,)](Placed(2**44, torch.int32), wanted, Placed(2**45, torch.int32), low, low + 40, 31)
    assert out == [low + int((keys < wanted).sum())]


def by_definition(dense: torch.Tensor, chunk: int) -> torch.Tensor:
    """Chunks in order, groups of as many chunks in order, groups in order: float32 throughout."""

    def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
        return sum(parts, torch.zeros_like(parts[0]))

    chunks = [in_order(list(part)) for part in dense.split(chunk)]
    groups = [in_order(chunks[i : i + chunk]) for i in range(0, len(chunks), chunk)]
    return in_order(groups)


#: (chunk, contributions): around one chunk and two; and, in chunks that the interpreter can afford, groups of them.
LONG = [(64, n) for n in (63, 64, 65, 129)] + [(8, n) for n in (64, 65, 127, 128, 129, 131)]


@pytest.mark.parametrize("slots", [3, 10_000])  # programs for slots, programs for positions
@pytest.mark.parametrize(("chunk", "length"), LONG)
def test_long_segments_add_as_defined(chunk: int, length: int, slots: int, constant: SetConstant) -> None:
    """To the last bit, wherever the segment starts; values of very different magnitude show any other order."""
    constant(sorting, "CHUNK", chunk)
    g = torch.Generator().manual_seed(length)
    lead = length % 37
    count = lead + length + 5
    index = torch.full((count,), 1)
    index[:lead], index[lead + length :] = 0, 2
    order = torch.randperm(count, generator=g)  # others lie in between
    index = index[order]
    src = torch.randn(count, 2, generator=g) * 2.0 ** torch.randint(-8, 8, (count, 2), generator=g)
    out = torch.zeros(slots, 2)
    plan = required(problem(count, slots, 2), "sorted_sum", INTERPRETER)
    plan.run(tp.IndexAddArgs(index=index, src=src, out=out), tp.Workspace.allocate(plan))
    for slot in range(3):
        own = src[index == slot]
        want = by_definition(own, chunk) if len(own) else torch.zeros(2)
        assert torch.equal(out[slot].view(torch.int32), want.view(torch.int32)), slot
    assert not out[3:].any()


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize(("count", "slots"), [(7, 3), (300, 2), (512, 100), (12, 100)])
def test_scanning_and_sorting_give_the_same_bits(count: int, slots: int, accumulate: bool) -> None:
    """Both rows have one ``numerics_id``; segments of one chunk and of several."""
    desc = tp.IndexSelectBackwardDescriptor(
        out_shape=(count, 3), select_dim=0, src_dim_size=slots, element="f32", accumulate=accumulate
    )
    g = torch.Generator().manual_seed(count)
    index = torch.randint(0, slots, (count,), generator=g)
    dout = torch.randn(count, 3, generator=g) * 2.0 ** torch.randint(-8, 8, (count, 3), generator=g)
    before = torch.randn(slots, 3, generator=g)
    found = []
    for row in ("sorted_sum", "scanned_sum"):
        plan = required(desc, row, INTERPRETER)
        dsrc = before.clone()
        args = tp.IndexSelectBackwardArgs(dout=dout, index=index, dsrc=dsrc)
        plan.run(args, tp.Workspace.allocate(plan))
        found.append((plan.sku().numerics_id, dsrc.view(torch.int32)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("layout", ["packed", "strided"])
@pytest.mark.parametrize("op", ["index_select_backward", "gather_backward"])
def test_slots_of_a_sparse_table_are_filled_not_launched(op: str, layout: str) -> None:
    """Of rows and of single elements; of so many that only the last program of the fill has idle lanes."""
    desc = build(op, (5, 41), 0, 201, element="f32", accumulate=False, layouts={"dsrc": layout})
    plan = required(desc, "sorted_sum", INTERPRETER)
    kernels = [launch.kernel for launch in plan.launches]
    assert fill_kernel in kernels
    assert sorting_kernels.starts_kernel not in kernels
    assert check_plan(plan, seed=1, runs=2).exact


@pytest.mark.parametrize("unit", [0, 1, 2])
@pytest.mark.parametrize(("element", "width"), [("f16", 21), ("f64", 21), ("f16", 37), ("f16", 133)])
def test_contributions_across_the_contiguous_axis_are_copied(
    element: str, width: int, unit: int, constant: SetConstant
) -> None:
    """Where they are contiguous along an axis of the indices, of which there are two; the first has rows of its own.

    Of these widths one is copied as it is; the others are padded to vectors, the last to those of a wide row.
    """
    constant(turned, "LAUNCH_US", 0.0)
    shape = (3, 90, width) if unit == 2 else (70, 5, width)
    layout = tp.Layout.strided(unit_axis=min(unit, 1))
    desc: tp.Descriptor
    if unit == 2:
        desc = tp.IndexAddDescriptor(
            src_shape=shape, add_dim=1, out_dim_size=7, element=element, layouts={"src": layout}
        )
    else:
        desc = tp.EmbeddingBackwardDescriptor(
            index_shape=shape[:2], num_embeddings=9, embedding_dim=width, element=element, layouts={"dout": layout}
        )
    plan = required(desc, "sorted_sum", INTERPRETER)
    assert any(launch.kernel is matrix_copy_kernel for launch in plan.launches)
    assert (sorting.summed_view(desc).span > width) == (width * tp.ElementKind(element).itemsize > 64)
    assert check_plan(plan, seed=unit, runs=1).exact
