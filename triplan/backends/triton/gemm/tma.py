"""What the Hopper kernels share: tensor maps of the operands, and which problems TMA can serve."""

from __future__ import annotations

from triplan.backends.runtime.gluon import gl
from triplan.backends.runtime.launch import Arg, Int, Scalar, TensorMap
from triplan.backends.triton.gemm import wgmma_shared_kernels as kernels
from triplan.backends.triton.gemm.arguments import contiguous_elements, matrix_strides, pointer
from triplan.backends.triton.gemm.matrices import (
    I32_COUNTER_LIMIT,
    is_contiguous,
    is_row_major,
    stride_multiple,
    unit_axis,
    vector_elements,
)
from triplan.backends.triton.gemm.rings import RINGS, Ring, rings_of, tiles_in
from triplan.descriptors.gemm import MatrixProductDescriptor, MultiplyingDescriptor
from triplan.sku import SUPPORTED, ElementKind, Support, Target
from triplan.sku.facts import fact

ACTIVATIONS = {
    "identity": kernels.identity,
    "relu": kernels.relu,
    "gelu": kernels.gelu,
    "silu": kernels.silu,
}
_GLUON_ELEMENT = {ElementKind.F16: gl.float16, ElementKind.BF16: gl.bfloat16, ElementKind.F32: gl.float32}


def shared_layout(block: tuple[int, ...], element: ElementKind) -> gl.NVMMASharedLayout:
    """The swizzled layout of a block in shared memory that TMA writes and wgmma reads."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_ELEMENT[element])


@fact
def tensor_map(
    name: str, element: ElementKind, rows: int, columns: int, row_major: bool, batched: bool = False
) -> TensorMap:
    """The map of a matrix in blocks of ``rows`` by ``columns``; of a column-major matrix, the map of its transpose."""
    block = (rows, columns) if row_major else (columns, rows)
    whole = (1, *block) if batched else block
    return TensorMap(name, element, whole, not row_major, shared_layout(whole, element))


def operand_maps(desc: MatrixProductDescriptor, ring: Ring) -> dict[str, TensorMap]:
    """The maps of a, b and c."""
    a, b, batched = desc.operand("a"), desc.operand("b"), bool(desc.lead)
    return {
        "a": tensor_map("a", a.element, ring.rows, ring.k, is_row_major(a), batched),
        "b": tensor_map("b", b.element, ring.k, ring.n - ring.rest, is_row_major(b), batched),
        "c": tensor_map("c", desc.out, ring.rows, ring.buffer_columns, True, batched),
    }


def common_arguments(desc: MatrixProductDescriptor, ring: Ring) -> tuple[dict[str, Arg], dict[str, object]]:
    """The arguments and constexprs that ``wgmma_kernel`` and ``wgmma_tiles_kernel`` share."""
    c0 = desc.operand("c0") if desc.reads_c0 else None
    strides, known = matrix_strides(c0, ("c0m", "c0n", "c0_batch"))
    strides.pop("c0n", None)
    known.pop("c0n", None)  # 1, as ``supports`` makes sure
    args: dict[str, Arg] = {
        **operand_maps(desc, ring),
        "c0": None if c0 is None else pointer(c0),
        "bias": pointer(desc.operand("bias")) if desc.has_bias else None,
        "alpha": Scalar("alpha", ElementKind.F32, 1.0),
        "beta": None if c0 is None else Scalar("beta", ElementKind.F32, 1.0),
        **strides,
        "m": Int(desc.m),
        "n": Int(desc.n),
        "k": Int(desc.k),
        "group_m": Int(ring.group),
    }
    return args, {
        **known,
        "A_ROWS": is_row_major(desc.operand("a")),
        "B_ROWS": is_row_major(desc.operand("b")),
        "BLOCK_N": ring.n,
        "BLOCK_K": ring.k,
        "STAGES": ring.stages,
        "ACTIVATION": ACTIVATIONS[desc.activation],
        "C0_EACH": 1 if c0 is None else contiguous_elements(c0),
    }


def unmappable(desc: MultiplyingDescriptor, name: str) -> str:
    """Why TMA cannot map a matrix; empty if it can."""
    o = desc.operand(name)
    unit = unit_axis(o)
    repeats = any(axis >= len(o.shape) - 2 for axis in o.layout.zero_axes) or (name == "c" and o.layout.zero_axes)
    if unit is None:
        return f"{name} is promised no unit stride"
    if repeats:
        return f"{name} has a stride of 0"
    if name == "c" and unit != 1:
        return "c is column-major"
    if o.alignment < 16:
        return f"{name} is promised an alignment of {o.alignment} bytes; 16 are needed"
    if (multiple := stride_multiple(o)) % (needed := vector_elements(o.element.itemsize)):
        return f"{name} is promised stride_multiple={multiple} of its leading dimension; {needed} is needed"
    return ""


def supports(desc: MatrixProductDescriptor, target: Target, roomy: bool = False) -> Support:
    """Whether TMA can read and write the operands, and i32 counts everything.

    ``roomy``: what lies behind a row of C, up to the next 16-byte boundary, may be written.
    """
    if desc.saves_pre:
        return Support.no("does not write pre")
    if desc.reads_c0 and not is_row_major(desc.operand("c0")):
        return Support.no("c0 is not row-major")
    if desc.k == 0:
        return Support.no("k is 0, and TMA maps no empty matrix")
    if max(desc.m, desc.n, desc.k) >= I32_COUNTER_LIMIT:
        return Support.no(f"m, n, k = {desc.m}, {desc.n}, {desc.k}: TMA coordinates have 31 bits")
    if (most := max(tiles_in(desc, ring) for ring in RINGS)) >= I32_COUNTER_LIMIT:
        return Support.no(f"c has up to {most} tiles, which are counted in 31 bits")
    if not all(rings_of(desc, target, specialised) for specialised in (True, False)):
        return Support.no(f"no ring fits {target.shared_memory} bytes of shared memory")
    if desc.has_bias and not is_contiguous(desc.operand("bias")):
        return Support.no("bias is promised no unit stride")
    if reason := next((reason for name in "abc" if (reason := unmappable(desc, name))), ""):
        return Support.no(f"reads and writes by TMA: {reason}")
    width = vector_elements(desc.out.itemsize)
    if desc.n % width and not roomy:
        # The hardware writes each row of C up to the next 16-byte boundary, beyond C (observed on an H200).
        return Support.no(f"TMA writes 16 bytes at a time, and n is not a multiple of {width}")
    return SUPPORTED
