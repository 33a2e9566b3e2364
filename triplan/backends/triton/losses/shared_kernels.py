"""What all losses over classes share: targets, and sums over rows.

Sums over rows are made in two steps of fixed order, without atomics: a program reduces ``each`` rows, and whoever needs
the whole reduces the at most PARTS results of the first step.
"""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton
import triton.language as tl

from triplan.backends.triton.common.indices_kernels import report, resolve


@triton.jit
def targets_of(target, row, live, n, ignore, status, CLAMP: tl.constexpr):
    """The class of each of the rows ``row`` (0 where there is none), and whether the row is kept."""
    given = tl.load(target + row, mask=live, other=0).to(tl.int64)
    live = live & (given != ignore)
    at, kept = resolve(given, n, live, False, CLAMP)
    if status is not None:
        report(status, live & (kept == 0), row)
    return tl.where(kept, at, 0), kept


@triton.jit
def of_class(table, at, kept, COMPUTE: tl.constexpr):
    """The entry of a class in a table of all, which may be absent: 1 then; 0 for rows that are not kept."""
    found = tl.where(kept, 1.0, 0.0).to(COMPUTE)
    if table is not None:
        found = tl.load(table + at, mask=kept, other=0.0).to(COMPUTE)
    return found


@triton.jit
def added(parts, count, COMPUTE: tl.constexpr, PARTS: tl.constexpr):
    """The sum of the results of a first step."""
    at = tl.arange(0, PARTS)
    return tl.sum(tl.load(parts + at, mask=at < count, other=0.0).to(COMPUTE), 0)


@triton.jit
def share_of(share, counts, parts, at, kept, MEAN: tl.constexpr, COMPUTE: tl.constexpr, PARTS: tl.constexpr):
    """What a row's loss is multiplied by in the reduced loss; 0 for rows that are not kept."""
    found = of_class(share, at, kept, COMPUTE)
    if MEAN:
        found = tl.where(kept, found / added(counts, parts, COMPUTE, PARTS), 0.0)
    return found


@triton.jit
def incoming(dloss, row, live, EACH: tl.constexpr, COMPUTE: tl.constexpr):
    """The gradient of each row's loss, or of the one loss."""
    if EACH:
        found = tl.load(dloss + row, mask=live, other=0.0).to(COMPUTE)
    else:
        found = tl.load(dloss).to(COMPUTE)
    return found


@triton.jit
def loss_count_kernel(
    target, counted, counts, rows, each, n, ignore, CLAMP: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
):
    """First step of a mean's denominator: the sum of ``counted`` at the targets. It depends on targets alone."""
    first = tl.program_id(0).to(tl.int64) * each
    total = tl.zeros((BLOCK,), COMPUTE)
    for start in range(0, each, BLOCK):
        row = first + start + tl.arange(0, BLOCK)
        at, kept = targets_of(target, row, row < rows, n, ignore, None, CLAMP)
        total += of_class(counted, at, kept, COMPUTE)
    tl.store(counts + tl.program_id(0), tl.sum(total, 0))


@triton.jit
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
    """First step of the loss: sums of numerators and, with COUNT, of a mean's denominators, which else are there
    already; all of it if ``loss`` is given. Losses of rows that are not kept are 0."""
    first = tl.program_id(0).to(tl.int64) * each
    total = tl.zeros((BLOCK,), COMPUTE)
    count = tl.zeros((BLOCK,), COMPUTE)
    for start in range(0, each, BLOCK):
        row = first + start + tl.arange(0, BLOCK)
        live = row < rows
        value = tl.load(losses + row, mask=live, other=0.0)
        if COUNT or share is not None:
            at, kept = targets_of(target, row, live, n, ignore, None, CLAMP)
            if share is not None:
                value = tl.where(kept, value * of_class(share, at, kept, COMPUTE), 0.0)
            if COUNT:
                count += of_class(counted, at, kept, COMPUTE)
        total += value
    whole = tl.sum(total, 0)
    if COUNT:
        counted_whole = tl.sum(count, 0)
    if loss is not None:
        if COUNT:
            whole = whole / counted_whole
        elif MEAN:
            whole = whole / tl.load(counts)
        tl.store(loss, whole.to(loss.dtype.element_ty))
    else:
        tl.store(sums + tl.program_id(0), whole)
        if COUNT:
            tl.store(counts + tl.program_id(0), counted_whole)


@triton.jit
def loss_finish_kernel(sums, counts, loss, parts, MEAN: tl.constexpr, COMPUTE: tl.constexpr, PARTS: tl.constexpr):
    """Second step of the loss."""
    whole = added(sums, parts, COMPUTE, PARTS)
    if MEAN:
        whole = whole / added(counts, parts, COMPUTE, PARTS)
    tl.store(loss, whole.to(loss.dtype.element_ty))


@triton.jit
def class_sum_kernel(weight, total, n, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of all classes' weights, which label smoothing needs, by one program."""
    found = tl.zeros((BLOCK,), COMPUTE)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        found += tl.load(weight + at, mask=at < n, other=0.0)
    tl.store(total, tl.sum(found, 0))
