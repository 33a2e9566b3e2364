"""Select's choices of kernel and tile for matrix products, against the sweeps in ``bench/results``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import H200
from cases.gemm import LOOSE_ROW, backward

import triplan as tp
from bench.gemm.cases import DTYPES, args_of, cases, descriptor_of, make
from triplan.backends.triton.gemm.rings import cheapest_ring, tiles_in
from triplan.backends.triton.gemm.tile_costs import cheapest_tile

FILES = sorted((Path(__file__).parents[3] / "bench" / "results").glob("gemm-*-sweep.json"))
#: What a choice of kernel and configuration may cost beside the best one, as clocks drift by a few per cent in a run;
#: and of a tile by pointers, where others may be far better still.
SLOWER, SLOWER_TILE = 1.07, 1.10
Times = dict[str, dict[str, float]]


def measured() -> Iterator[tuple[str, str, Times]]:
    """(dtype, case, microseconds by row and configuration) of each case of which configurations were timed."""
    for path in FILES:
        content = json.loads(path.read_text())
        found: dict[str, Times] = {}
        for r in content["rows"]:
            row, _, way = str(r["contestant"]).partition(" ")
            if "device_us" in r and row in ENTRIES and way:
                found.setdefault(r["case"], {}).setdefault(row, {})[way] = r["device_us"]
        for case, times in found.items():
            yield content["settings"]["dtype"], case, times


ENTRIES = [entry.name for entry in tp.TABLE.rows("gemm")]
PROBLEMS = {f"{dtype} {case}": (dtype, case, times) for dtype, case, times in measured()}


def problem(dtype: str, name: str) -> tp.Descriptor:
    case = next(c for c in cases(False, sweep=True) if c.name == name)
    small = make(case, DTYPES[dtype], torch.device("meta"), None)
    return descriptor_of(args_of(case, small))


def costs(row: str, desc: tp.Descriptor) -> dict[str, float]:
    """Of each configuration of a row, as its model estimates them."""
    found = next(r for r in tp.TABLE.rows(desc.op) if r.name == row).configurations(desc, H200)
    return {name: way.cost for name, way in found.items()}


def chosen(row: str, desc: tp.Descriptor, times: dict[str, float]) -> str:
    """The configuration that the model takes, of those that were timed."""
    return min((cost, way) for way, cost in costs(row, desc).items() if way in times)[1]


def test_small_products_and_large_ones_were_measured() -> None:
    assert len(PROBLEMS) >= 7
    rows = [row for _, _, times in PROBLEMS.values() for row in times]
    assert all(rows.count(row) >= 5 for row in ("tiles", "wgmma"))


def test_short_sums_into_words_of_c_take_small_tiles() -> None:
    """No other program hides the epilogue of a large one."""
    wide = tp.GemmDescriptor(m=283, n=1478622, k=32, element="f16", layouts={"b": tp.Layout.strided(unit_axis=0)})
    assert cheapest_tile(wide, H200).warps == 4
    assert cheapest_tile(wide.replace(n=1478624), H200).warps == 8


def test_an_outer_product_does_not_pass_the_staging_buffers_of_wgmma() -> None:
    """However short k is, a tile of C leaves through registers and shared memory."""
    db = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
    desc = backward(1, 2016, 65537, "f16", (0, 1, 0), layouts={"dc": LOOSE_ROW, "db": db})
    assert tp.plan(desc, target=H200).sku().kernel == "separate"


def test_copies_of_factors_of_long_sums_are_worth_their_time() -> None:
    layouts = {
        "a": tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=4),
        "b": tp.Layout.strided(unit_axis=2),
    }
    desc = tp.BatchedGemmDescriptor(batch=64, m=748, n=65, k=5376, element="f16", epilogue="gelu", layouts=layouts)
    assert tp.plan(desc, target=H200).candidates[0].kernel == "realigned"
    few = tp.GemmDescriptor(m=128, n=4095, k=2614, element="f16", epilogue="bias")
    assert tp.plan(few, target=H200).candidates[0].kernel == "split_k"


def test_the_error_function_of_gelu_counts_where_k_is_short() -> None:
    """It takes longer than the product, and the Hopper kernels compute it while nothing is multiplied."""
    short = tp.BatchedGemmDescriptor(batch=129, m=51, n=768, k=38, element="f16", epilogue="bias_gelu")
    assert tp.plan(short, target=H200).candidates[0].kernel == "tiles"
    assert tp.plan(short.replace(m=1023, k=1098), target=H200).candidates[0].kernel == "realigned"


def test_a_sum_of_one_step_fills_no_pipeline() -> None:
    one = tp.GemmDescriptor(m=373, n=2048, k=23, element="bf16", epilogue="relu")
    assert tp.plan(one, target=H200).candidates[0].kernel == "tiles"


def test_pieces_of_fma_are_read_beside_c0_and_c() -> None:
    thin = tp.BatchedGemmDescriptor(batch=31, m=4096, n=32, k=19, element="f32", reads_c0=True)
    assert tp.plan(thin, target=H200).candidates[0].kernel == "tiles"


def test_several_waves_of_tiles_are_dealt_to_programs_that_stay() -> None:
    """Programs of one tile each begin every wave with an empty ring."""
    waves = tp.GemmDescriptor(m=601, n=8192, k=2048, element="f16")
    assert tp.plan(waves, target=H200).candidates[0].kernel == "wgmma"
    assert tp.plan(waves.replace(m=128), target=H200).candidates[0].kernel == "wgmma_tiles"


@pytest.mark.parametrize(
    ("extents", "tile"),
    [((3072, 1536, 5120), (192, 192)), ((1024, 2560, 9728), (128, 160)), ((6144, 768, 1600), (192, 192))],
)
def test_tiles_whose_extents_are_no_powers_of_two_fill_one_wave(
    extents: tuple[int, int, int], tile: tuple[int, int]
) -> None:
    """There are 128 of them; of 128 by 128 or by 256 the last wave would be nearly empty, or half of the only one."""
    m, n, k = extents
    desc = tp.GemmDescriptor(m=m, n=n, k=k, element="bf16")
    ring = cheapest_ring(desc, H200, specialised=True)
    assert (ring.m, ring.n) == tile
    assert tiles_in(desc, ring) == 128
    assert tp.plan(desc, target=H200).sku().kernel == "wgmma"


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_tile_by_pointers_is_about_the_fastest(name: str) -> None:
    dtype, case, times = PROBLEMS[name]
    for row in {"tiles", "split_k"} & times.keys():
        desc = problem(dtype, case)
        way, best = chosen(row, desc, times[row]), min(times[row][way] for way in costs(row, desc) if way in times[row])
        assert times[row][way] <= SLOWER_TILE * best, f"{row} {way}: {times[row][way]:.1f} us, the best took {best:.1f}"


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_kernel_is_about_the_fastest(name: str) -> None:
    dtype, case, times = PROBLEMS[name]
    desc = problem(dtype, case)
    plan = tp.plan(desc, preference=tp.PlanPreference(deterministic=False), target=H200)
    row = next(c.kernel for c in plan.candidates if c.kernel in times)  # the first is the cheapest
    got = times[row][chosen(row, desc, times[row])]
    best, other = min((us, f"{row} {way}") for row, ways in times.items() for way, us in ways.items())
    assert got <= SLOWER * best, f"{row} took {got:.1f} us, {other} {best:.1f}"
