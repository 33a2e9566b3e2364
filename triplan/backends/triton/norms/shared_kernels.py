"""What the kernels of rms_norm, layer_norm and l2_norm share: statistics, weight and bias, and the formulas.

    rms_norm    out = x * rstd * (weight + OFFSET)                    rstd = 1 / sqrt(mean(x^2) + eps)
    layer_norm  out = (x - mean) * rstd * (weight + OFFSET) + bias    rstd = 1 / sqrt(var(x) + eps)
    l2_norm     out = x / max(norm, eps)                              norm = sqrt(sum(x^2))

One set of kernels computes all three: CENTRED (layer_norm) subtracts the mean, LENGTH (l2_norm) divides by the length
of a row instead of the root of its mean square. With hat = (x - mean) * scale and g = dout * (weight + OFFSET), where
scale is rstd, or 1 / max(norm, eps), their backward is

    rms_norm    dx = (g - hat * mean(g * hat)) * scale
    layer_norm  dx = (g - hat * mean(g * hat) - mean(g)) * scale
    l2_norm     dx = (g - hat * sum(g * hat)) * scale, or g * scale where norm < eps
    all         dweight = sum(dout * hat), dbias = sum(dout) over the rows

Operands:

- ``x``, ``out``, ``residual``, ``summed`` and their gradients: [outer, lanes, n] of f16, bf16, f32 or f64, with strides
  as in ``common/rows_kernels``. If ``residual`` is given, x + residual is normalised, and also written to ``summed``;
- ``mean``, ``rstd``: [rows] of COMPUTE, which is f32, or f64 for operands of f64. For l2_norm ``rstd`` holds the norm;
- ``weight``, ``bias``: [n], packed. Optional operands are None where they are absent.

Deviations are centred twice. A mean that comes from a sum has an error of one rounding of the mean's size; the mean of
the deviations from it, its *correction*, removes that error. Otherwise rows far from 0 would lose the digits by
which their mean exceeds their spread (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance",
equation 1.7, corrected two-pass).
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.rows_kernels import axis_offset, element_pointers, row_pointers
from triplan.sku import interpreting

#: Whether two sums share one reduction. The interpreter would walk through a joint one element by element.
JOINT_REDUCTION = tl.constexpr(not interpreting())


# --- reductions and statistics ---


@jit
def add_pairs(a, b, c, d):
    """(a + c, b + d)."""
    return a + c, b + d


@jit
def two_sums(a, b, axis: tl.constexpr, keep_dims: tl.constexpr):
    """(sum(a), sum(b)) along ``axis``, in one reduction: threads synchronize once."""
    if JOINT_REDUCTION:
        sums = tl.reduce((a, b), axis, add_pairs, keep_dims=keep_dims)
    else:
        sums = (tl.sum(a, axis, keep_dims=keep_dims), tl.sum(b, axis, keep_dims=keep_dims))
    return sums


@jit
def add_fours(a, b, c, d, e, f, g, h):
    """(a + e, b + f, c + g, d + h)."""
    return a + e, b + f, c + g, d + h


@jit
def sums_of(values, axis: tl.constexpr):
    """The sum of each of a tuple of blocks along ``axis``, which stays: four at a time in one reduction."""
    sums = ()
    for i in tl.static_range(0, len(values), 4):
        if not JOINT_REDUCTION or i + 4 > len(values):
            for j in tl.static_range(i, min(i + 4, len(values))):
                sums = sums + (tl.sum(values[j], axis, keep_dims=True),)
        else:
            four = (values[i], values[i + 1], values[i + 2], values[i + 3])
            sums = sums + tl.reduce(four, axis, add_fours, keep_dims=True)
    return sums


@jit
def scale_of_statistic(statistic, eps, LENGTH: tl.constexpr):
    """scale = statistic, which is rstd; with LENGTH, 1 / max(statistic, eps), where the statistic is the norm."""
    scale = statistic
    if LENGTH:
        scale = 1.0 / tl.where(statistic < eps, eps, statistic)  # a comparison, as max() would drop NaN
    return scale


@jit
def squares_about_mean(squares, correction, count):
    """sum((v - mean)**2) of ``count`` elements: squares - correction**2 * count, at least 0, of one shape, where
    squares = sum((v - centre)**2) and mean = centre + correction.

    ``correction`` has the size of a rounding of ``centre``, so that the subtraction never cancels all of ``squares``.
    """
    squares -= correction * correction * count
    return tl.where(squares < 0, 0.0, squares)


@jit
def statistic_and_scale(squares, inverse_n, eps, LENGTH: tl.constexpr):
    """scale = 1 / sqrt(squares / n + eps), which is also the saved statistic; with LENGTH, 1 / max(norm, eps) and norm.

    ``squares``: sums of squares, one per row; returns (statistic, scale) of the same shape.
    """
    if LENGTH:
        statistic = tl.sqrt(squares)
    else:
        statistic = tl.rsqrt(squares * inverse_n + eps)
    return statistic, scale_of_statistic(statistic, eps, LENGTH)


# --- weight and bias ---


@jit
def load_parameter(pointer, col, live_col):
    """Elements ``col`` of weight or bias; None if it is absent."""
    loaded = None
    if pointer is not None:
        loaded = tl.load(pointer + col, mask=live_col, other=0.0, eviction_policy="evict_last")
    return loaded


@jit
def affine(v, w, b, OFFSET: tl.constexpr):
    """v * (w + OFFSET) + b; ``w`` and ``b`` broadcast against ``v``, or are None where they are absent."""
    if w is not None:
        w = w.to(v.dtype)
        if OFFSET:
            w += OFFSET
        v = v * w
    if b is not None:
        v = v + b.to(v.dtype)
    return v


@jit
def load_affine(v, weight, bias, col, live_col, OFFSET: tl.constexpr):
    """``affine`` of ``v`` with elements ``col`` of weight and bias."""
    return affine(v, load_parameter(weight, col, live_col), load_parameter(bias, col, live_col), OFFSET)


# --- forward ---


@jit
def optional_row_pointers(pointer, strides, outer, sizes, lane):
    """``row_pointers`` of an operand; None if it is absent."""
    pointers = None
    if pointer is not None:
        pointers = row_pointers(pointer, strides, outer, sizes, lane)
    return pointers


@jit
def load_input(at, strides, residual_at, residual_strides, col, live, COMPUTE: tl.constexpr, POLICY: tl.constexpr):
    """x + residual in COMPUTE, or x in its own element: elements ``col`` of the rows that begin at ``at``."""
    v = tl.load(at + axis_offset(col, strides[2]), mask=live, other=0.0, eviction_policy=POLICY)
    if residual_at is not None:
        v = v.to(COMPUTE)
        more = tl.load(
            residual_at + axis_offset(col, residual_strides[2]), mask=live, other=0.0, eviction_policy=POLICY
        )
        v += more.to(COMPUTE)
    return v


@jit
def normalised(v, centre, correction, scale, CENTRED: tl.constexpr):
    """(v - centre - correction) * scale; without CENTRED v * scale."""
    if CENTRED:
        v = (v - centre) * scale - correction * scale  # the second product and the subtraction are one FMA
    else:
        v = v * scale
    return v


@jit
def store_output(
    v,
    at,
    out,
    summed,
    weight,
    bias,
    out_strides,
    summed_strides,
    sizes,
    outer,
    lane,
    col,
    live,
    live_col,
    centre,
    correction,
    scale,
    CENTRED: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """out = (v - centre - correction) * scale * (weight + OFFSET) + bias, for elements ``col`` of some rows.

    ``v``: the rows' elements in COMPUTE, also stored in ``summed`` if that is given; ``at``: where their output begins;
    ``live_col``: which columns there are.
    """
    if summed is not None:
        sums_to = element_pointers(summed, summed_strides, outer, sizes, lane, col)
        tl.store(sums_to, v.to(summed.dtype.element_ty), mask=live)
    y = load_affine(normalised(v, centre, correction, scale, CENTRED), weight, bias, col, live_col, OFFSET)
    tl.store(at + axis_offset(col, out_strides[2]), y.to(out.dtype.element_ty), mask=live)


# --- backward ---


@jit
def projection_of(total, n, statistic, eps, LENGTH: tl.constexpr):
    """total / n; with LENGTH, total, or 0 where the norm is below eps: the factor of hat in ``store_gradient``.

    ``total``: sums of g * hat, one per row. Below eps the forward divides by eps, a constant, so hat is linear in x.
    """
    if LENGTH:
        projection = tl.where(statistic < eps, 0.0, total)
    else:
        projection = total / n
    return projection


@jit
def gradient_of(g, hat, g_mean, scale, projection, CENTRED: tl.constexpr):
    """(g - hat * projection - g_mean) * scale; ``g_mean`` is 0 without CENTRED."""
    d = g - hat * projection
    if CENTRED:
        d = d - g_mean
    return d * scale


@jit
def store_gradient(
    g,
    hat,
    at,
    dx,
    dbranch,
    dsummed,
    dx_strides,
    dbranch_strides,
    dsummed_strides,
    sizes,
    outer,
    lane,
    col,
    live,
    g_mean,
    scale,
    projection,
    CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
    more=None,
):
    """dx = (g - hat * projection - g_mean) * scale + dsummed, for the elements ``col`` of rows that begin at ``at``.

    ``dbranch``, where it is given, receives the same in its own element. ``more``: the elements of dsummed, where they
    are loaded already.
    """
    d = gradient_of(g, hat, g_mean, scale, projection, CENTRED)
    if more is not None:
        d += more.to(COMPUTE)
    elif dsummed is not None:
        more_at = element_pointers(dsummed, dsummed_strides, outer, sizes, lane, col)
        d += tl.load(more_at, mask=live, other=0.0).to(COMPUTE)
    tl.store(at + axis_offset(col, dx_strides[2]), d.to(dx.dtype.element_ty), mask=live)
    if dbranch is not None:
        narrow = element_pointers(dbranch, dbranch_strides, outer, sizes, lane, col)
        tl.store(narrow, d.to(dbranch.dtype.element_ty), mask=live)
