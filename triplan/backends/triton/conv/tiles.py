"""Kernel ``tiles``: convolution and its gradients as matrix products of tiles, read through pointers; no atomics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from triplan.backends.runtime.launch import Arg, Int, Launch
from triplan.backends.triton.common import card
from triplan.backends.triton.common.offsets import TL, divisor
from triplan.backends.triton.common.strides import count
from triplan.backends.triton.conv import shared, tiles_kernels as kernels
from triplan.backends.triton.conv.tile_costs import estimated_us
from triplan.backends.triton.conv.tile_shapes import Tiling, features, reduced, strided
from triplan.descriptors.conv import Conv2dProblem
from triplan.sku import MathPrecision, PrecisionGuarantee, Support, Target


def periods(desc: Conv2dProblem) -> tuple[int, int]:
    """One in so many taps of each axis reaches a row or column."""
    first, second = (s // math.gcd(s, d) for s, d in zip(desc.stride, desc.dilation, strict=True))
    return first, second


class Tiles(Tiling):
    """The entry ``name``."""

    def supports(self, desc: Conv2dProblem, target: Target) -> Support:
        return shared.counted(desc, self.programs(desc))

    def rank(self, desc: Conv2dProblem, target: Target) -> float:
        return estimated_us(self, desc, target)

    def guarantee(self, desc: Conv2dProblem) -> Mapping[str, PrecisionGuarantee]:
        if shared.of_weight(desc):
            return shared.guaranteed(desc, desc.multiplicands, shared.pixels(desc), self.parts(desc)[0])
        return shared.guaranteed(desc, desc.multiplicands, reduced(desc) * desc.taps, 1)

    def numerics(self, desc: Conv2dProblem) -> str | None:
        if shared.of_weight(desc):
            return None
        tile = self.tile_of(desc)
        shape = f"{reduced(desc)}.{'x'.join(map(str, desc.kernel))}.{tile.n}x{tile.k}{self.flat(desc) * 'f'}"
        return f"{desc.op}.{self.name}.{desc.element}.{desc.multiplicands}.{shape}.v1"

    def workspace(self, desc: Conv2dProblem, target: Target) -> int:
        return self.parts_bytes(desc)

    def _shared(self, desc: Conv2dProblem) -> dict[str, Arg]:
        m, n = self.tiles(desc)
        sizes = {"taps": Int(desc.taps), "tiles_m": Int(m), "tiles_n": Int(n), "channels": count(reduced(desc))}
        return {**sizes, **shared.geometry(desc)}

    def _launch(
        self, desc: Conv2dProblem, target: Target, which: Any, args: Mapping[str, Arg], **constants: object
    ) -> Launch:
        """The main launch."""
        tile, programs = self.tile_of(desc), self.programs(desc)
        constants |= {
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
            "PRECISION": "tf32" if desc.multiplicands is MathPrecision.TF32 else "ieee",
            "FLAT": self.flat(desc),
            "ACC": TL[desc.element.compute],
        }
        # ptxas would spill a few registers, for one more program.
        spills = desc.element.itemsize == 8 and not self.small
        return Launch(
            which,
            programs,
            args,
            constants,
            num_warps=tile.warps,
            num_stages=tile.stages,
            overlaps=shared.begins_early(programs, target),
            max_registers=card.MAX_THREAD_REGISTERS if spills else None,
        )

    def build(self, desc: Conv2dProblem, target: Target) -> list[Launch]:
        """The result, or the gradient of x."""
        if self.programs(desc) == 0:
            return []
        names, channels = ("period_rows", "period_columns"), reduced(desc)
        divides = self.flat(desc) and channels % 2 == 1
        args: dict[str, Arg] = {
            **shared.of_pixels(desc),
            "pixels": Int(shared.pixels(desc)),
            "features": count(features(desc)),
            "own_weights": count(desc.filters),
            **{name: Int(n) if strided(desc) else None for name, n in zip(names, periods(desc), strict=True)},
            **self._shared(desc),
            **shared.divided(*((desc.height, desc.width) if shared.of_input(desc) else desc.out_extents)),
            "channels": (count(channels), *(divisor(channels, wide=False)[1:] if divides else (None, None))),
        }
        return [self._launch(desc, target, kernels.conv2d_tiles_kernel, args, TRANSPOSED=shared.of_input(desc))]

    def build_weight(self, desc: Conv2dProblem, target: Target) -> list[Launch]:
        """The gradient of weight: each part of the pixels, then the sum of the parts."""
        parts, each = self.parts(desc)
        if self.programs(desc) == 0:
            return []
        args: dict[str, Arg] = {
            **shared.of_parts(desc, parts, each),
            "pixels": Int(shared.pixels(desc)),
            "filters": count(desc.filters),
            "groups": Int(desc.groups),
            **self._shared(desc),
            **shared.divided(*desc.out_extents),
        }
        return [self._launch(desc, target, kernels.conv2d_weight_kernel, args), *shared.fold(desc, parts, target)]

    def register(self, priority: int, **weight: object) -> None:
        """The entry of these tiles; ``weight``: in what that of the gradient of weight differs."""
        shared.register(
            self.build,
            self.build_weight,
            name=self.name,
            supports=self.supports,
            rank=self.rank,
            workspace=self.workspace,
            guarantee=self.guarantee,
            numerics=self.numerics,
            priority=priority,
            weight=weight,
        )


TILED = Tiles("tiles")
TILED.register(priority=1, version=4)  # after depthwise, whose bits are others
