"""What ptxas makes of attention, which multiplies by k and by v: descriptors of wgmma of two layouts."""

from __future__ import annotations

import pytest
from cases import H200, compiles, required
from machine_code import layouts, unwritten

import triplan as tp
from triplan.backends.runtime.compile import sass

#: Of a kernel whose descriptors of v were wrong: %s adds to what the loop alone writes.
LISTING = """
        /*0010*/                   UMOV UR5, 0x400 ;
        /*0020*/                   UIADD3 UR14, UP0, %s, 0x40, URZ ;
        /*0030*/                   UIADD3.64 UR22, UR14, UR4, URZ ;
        /*0040*/              @!P2 BRA 0x60 ;
        /*0050*/                   ULDC.64 UR6, c[0x0][0x258] ;
        /*0060*/                   HGMMA.64x32x16.F32.BF16 R24, R40, gdesc[UR4].tnspB, R24, gsb0 ;
        /*0070*/                   UMOV UR18, UR14 ;
        /*0080*/              @!P3 BRA 0x20 ;
        /*0090*/                   EXIT ;
        /*00a0*/                   BRA 0xa0;
"""


def test_registers_that_nothing_wrote_are_found() -> None:
    """On any path: UR4 on none, UR6 of the descriptor on that which branches."""
    always = ["30: UIADD3.64 UR22, UR14, UR4, URZ", "60: HGMMA.64x32x16.F32.BF16 R24, R40, gdesc[UR4].tnspB, R24, gsb0"]
    # UIADD3.64 reads UR15, too, which is not written either way.
    assert unwritten((LISTING % "UR5").splitlines()) == always
    assert unwritten((LISTING % "UR18").splitlines()) == ["20: UIADD3 UR14, UP0, UR18, 0x40, URZ", *always]
    sound = LISTING.replace("UR14, UR4", "UR14, 0x2").replace("UMOV UR5, 0x400", "ULDC.64 UR14, c[0x0][0x4]")
    assert unwritten((sound.replace("@!P2 BRA", "BAR.SYNC") % "UR14").splitlines()) == []


def test_products_have_factors_of_32_bits() -> None:
    """UR5, UR7 and UR15 are written nowhere, and read by none but the sum of 64 bits."""
    listing = """
        /*0000*/                   R2UR UR4, R0 ;
        /*0010*/                   R2UR UR6, R1 ;
        /*0020*/                   UMOV UR14, 0x2 ;
        /*0030*/                   UIMAD.WIDE.U32 UR10, UR4, UR6, URZ ;
        /*0040*/                   UIMAD.WIDE.U32 UR12, UP0, UR4, UR6, UR10 ;
        /*0050*/                   UIMAD.WIDE UR16, UR4, UR6, UR14 ;
    """
    assert unwritten(listing.splitlines()) == ["50: UIMAD.WIDE UR16, UR4, UR6, UR14"]


def test_copies_of_what_nothing_wrote_are_not_written() -> None:
    """Half of a pair is copied before it is written: only what reads it meanwhile is wrong."""
    listing = """
        /*0000*/                   ULDC UR4, c[0x0][0x210] ;
        /*0010*/                   UMOV UR8, UR4 ;
        /*0020*/                   UMOV UR9, UR5 ;
        /*0030*/                   %s ;
        /*0040*/                   UIADD3.64 UR10, UR8, 0x40, URZ ;
        /*0050*/                   EXIT ;
    """
    assert unwritten((listing % "UIADD3 UR9, UR4, 0x1, URZ").splitlines()) == []
    assert unwritten((listing % "UMOV UR6, UR9").splitlines()) == ["40: UIADD3.64 UR10, UR8, 0x40, URZ"]


def test_indirect_branches_are_followed() -> None:
    """Parts of a block of their own begin where no other instruction leads: UR6 is written in one of them."""
    listing = """
        /*0000*/                   UMOV UR4, 0x1 ;
        /*0010*/                   BRX R2 -0x20 ;
        /*0020*/                   UMOV UR6, UR4 ;
        /*0030*/                   STS [UR6], R3 ;
        /*0040*/                   BRA 0x0 ;
        /*0050*/                   STS [UR4], R3 ;
        /*0060*/                   STS [UR6], R3 ;
        /*0070*/                   EXIT ;
    """
    assert unwritten(listing.splitlines()) == ["60: STS [UR6], R3"]


def test_layouts_are_told_apart_by_the_upper_half_of_a_descriptor() -> None:
    ptx = """
        or.b64 \t%rd98, %rd87, 4611686293305294848;
        add.s64 \t%rd99, %rd87, 4611686293305294850;
        add.s64 \t%rd50, %rd50, -64;
        wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%r1}, %rd98, %rd99, 0, 1, 1;
    """
    other = "or.b64 \t%rd120, %rd87, -9223371899415822336;"
    assert layouts(ptx) == 1
    assert layouts(ptx + "add.s64 %rd9, %rd87, 4611686293339111424;") == 1  # another stride along a row
    assert layouts(ptx + other) == 2
    assert layouts(other) == 0  # and no wgmma


@compiles
@pytest.mark.parametrize(
    ("widths", "math"), [((40, 24), None), ((24, 40), None), ((64, 16), "tf32"), ((32, 16), "tf32")], ids=str
)
@pytest.mark.parametrize(
    ("op", "kernel"), [("attention", "tiles"), ("attention", "large_tiles"), ("attention_backward", "tiles")]
)
def test_descriptors_are_of_what_was_written(op: str, kernel: str, widths: tuple[int, int], math: str | None) -> None:
    """Keys and values of different widths, whose tiles take turns at one address in shared memory."""
    if kernel == "large_tiles":
        math = None  # it multiplies in parts of f32 alone
    sizes = {"batch": 2, "queries": 300, "keys": 300, "heads": 4, "key_heads": 2}
    desc = tp.descriptor_types()[op](**sizes, head_dim=widths[0], value_dim=widths[1], element="f32", math=math)
    for found in required(desc, kernel, H200).compile():
        assert not unwritten(sass(found.cubin)), found.name
