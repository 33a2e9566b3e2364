"""What ptxas makes of attention, which multiplies by k and by v: descriptors of wgmma of two layouts."""

from __future__ import annotations

import pytest
from cases import H200, compiles, required
from machine_code import unwritten

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


@compiles
@pytest.mark.parametrize(
    ("widths", "math"), [((40, 24), None), ((24, 40), None), ((64, 16), "tf32"), ((32, 16), "tf32")], ids=str
)
@pytest.mark.parametrize("op", ["attention", "attention_backward"])
def test_descriptors_are_of_what_was_written(op: str, widths: tuple[int, int], math: str | None) -> None:
    """Keys and values of different widths, whose tiles take turns at one address in shared memory."""
    sizes = {"batch": 2, "queries": 300, "keys": 300, "heads": 4, "key_heads": 2}
    desc = tp.descriptor_types()[op](**sizes, head_dim=widths[0], value_dim=widths[1], element="f32", math=math)
    for found in required(desc, "tiles", H200).compile():
        assert not unwritten(sass(found.cubin)), found.name
