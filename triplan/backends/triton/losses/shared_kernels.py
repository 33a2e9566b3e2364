"""What the kernels of losses over classes share: targets, and sums over rows.

A row has one *target*, a class. Rows whose target is ``ignore``, or is no class, are not *kept*: they are not read, and
their losses and gradients are 0. ``weight`` and ``bytes`` are tables of the classes, [n] of COMPUTE, None where absent;
``share`` and ``counted`` are tables of the factor of a row's loss in the reduced loss, and of what the row adds to the
denominator of a mean. COMPUTE is f32, or f64 for operands of f64.

Sums over rows take two steps of fixed order, without atomics, so that they are deterministic. In the first, a program
sums ``each`` rows. In the second, every program that needs the total sums the
results of the first, PARTS at most.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.indices_kernels import report, resolve


@jit
def load_targets(target, row, live, n, ignore, status, CLAMP: tl.constexpr):
    """(class, kept) of each of the rows ``row``; the class is 0 where the row is not kept.

    target: [rows] of i32 or i64. If ``status`` is given, it receives the lowest row whose target is no class.
    """
    given = tl.load(target + row, mask=live, other=0).to(tl.int64)
    live = live & (given != ignore)
    label, kept = resolve(given, n, live, False, CLAMP)
    if status is not None:
        report(status, live & (kept == 0), row)
    return tl.where(kept, label, 0), kept


@jit
def class_value(table, label, kept, COMPUTE: tl.constexpr):
    """table[label], or 1 without a table; 0 for rows that are not kept."""
    value = tl.where(kept, 1.0, 0.0).to(COMPUTE)
    if table is not None:
        value = tl.load(table + label, mask=kept, other=0.0).to(COMPUTE)
    return value


@jit
def sum_parts(parts, count, COMPUTE: tl.constexpr, PARTS: tl.constexpr):
    """sum(parts); parts: [count], the results of a first step; PARTS >= count."""
    part = tl.arange(0, PARTS)
    return tl.sum(tl.load(parts + part, mask=part < count, other=0.0).to(COMPUTE), 0)


@jit
def row_share(
    share, counts, parts, target, n, ignore, label, kept, MEAN: tl.constexpr, CLAMP: tl.constexpr,
    COMPUTE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """share[label], with MEAN over sum(counts): the factor of a row's loss in the reduced loss; 0 if it is not kept.

    If ``counts`` is None, a mean is over the number of kept rows: each program counts them all, of which there are
    ``parts``.
    """
    factor = class_value(share, label, kept, COMPUTE)
    if MEAN:
        if counts is None:
            row = tl.arange(0, PARTS)
            _, counted = load_targets(target, row, row < parts, n, ignore, None, CLAMP)
            denominator = tl.sum(tl.where(counted, 1.0, 0.0).to(COMPUTE), 0)
        else:
            denominator = sum_parts(counts, parts, COMPUTE, PARTS)
        factor = tl.where(kept, factor / denominator, 0.0)
    return factor


@jit
def load_dloss(dloss, row, live, EACH: tl.constexpr, COMPUTE: tl.constexpr):
    """With EACH the gradient of each row's loss, dloss: [rows]; else that of the reduced loss, dloss: [1]."""
    if EACH:
        loaded = tl.load(dloss + row, mask=live, other=0.0).to(COMPUTE)
    else:
        loaded = tl.load(dloss).to(COMPUTE)
    return loaded


# --- sums over rows ---


@jit
def loss_count_kernel(
    target, counted, counts, rows, each, n, ignore, CLAMP: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
):
    """counts[program] = sum(counted[target]) over ``each`` rows: the first step of a mean's denominator.

    target: [rows] of i32 or i64; counted: [n], counts: [programs], of COMPUTE.

    It depends on targets alone, so it can run before gradients, which need it.
    """
    first = tl.program_id(0).to(tl.int64) * each
    total = tl.zeros((BLOCK,), COMPUTE)
    for start in range(0, each, BLOCK):
        row = first + start + tl.arange(0, BLOCK)
        label, kept = load_targets(target, row, row < rows, n, ignore, None, CLAMP)
        total += class_value(counted, label, kept, COMPUTE)
    tl.store(counts + tl.program_id(0), tl.sum(total, 0))


@jit
def loss_sum_kernel(
    target,
    losses,
    counted,
    share,
    sums,
    counts,
    loss,
    rows,
    each,
    n,
    ignore,
    MEAN: tl.constexpr,
    COUNT: tl.constexpr,
    CLAMP: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sums[program] = sum(losses * share[target]) over ``each`` rows: the first step of the reduced loss.

    target, losses: [rows]; counted, share: [n]; sums, counts: [programs] of COMPUTE; loss: [1], or None.

    With COUNT it also sums a mean's denominators; without, ``counts`` has them already. If ``loss`` is given, one
    program has all rows, and stores the reduced loss itself. Losses of rows that are not kept are 0.
    """
    first = tl.program_id(0).to(tl.int64) * each
    total = tl.zeros((BLOCK,), COMPUTE)
    count = tl.zeros((BLOCK,), COMPUTE)
    for start in range(0, each, BLOCK):
        row = first + start + tl.arange(0, BLOCK)
        live = row < rows
        value = tl.load(losses + row, mask=live, other=0.0)
        if COUNT or share is not None:
            label, kept = load_targets(target, row, live, n, ignore, None, CLAMP)
            if share is not None:
                value = tl.where(kept, value * class_value(share, label, kept, COMPUTE), 0.0)
            if COUNT:
                count += class_value(counted, label, kept, COMPUTE)
        total += value
    numerator = tl.sum(total, 0)
    if COUNT:
        denominator = tl.sum(count, 0)
    if loss is not None:
        if COUNT:
            numerator = numerator / denominator
        elif MEAN:
            numerator = numerator / tl.load(counts)
        tl.store(loss, numerator.to(loss.dtype.element_ty))
    else:
        tl.store(sums + tl.program_id(0), numerator)
        if COUNT:
            tl.store(counts + tl.program_id(0), denominator)


@jit
def loss_finish_kernel(sums, counts, loss, parts, MEAN: tl.constexpr, COMPUTE: tl.constexpr, PARTS: tl.constexpr):
    """loss = sum(sums), with MEAN over sum(counts): the second step. sums, counts: [parts] of COMPUTE; loss: [1]."""
    total = sum_parts(sums, parts, COMPUTE, PARTS)
    if MEAN:
        total = total / sum_parts(counts, parts, COMPUTE, PARTS)
    tl.store(loss, total.to(loss.dtype.element_ty))


@jit
def class_sum_kernel(weight, total, n, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """total = sum(weight) over all classes, by one program; label smoothing needs it.

    weight: [n], total: [1], of COMPUTE.
    """
    weights = tl.zeros((BLOCK,), COMPUTE)
    for start in range(0, n, BLOCK):
        label = start + tl.arange(0, BLOCK)
        weights += tl.load(weight + label, mask=label < n, other=0.0)
    tl.store(total, tl.sum(weights, 0))
