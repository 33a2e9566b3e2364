"""Kernels of ``update``: steps of a list of parameters; the update rule is a jit function."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl

from triplan.backends.runtime.jit import jit
from triplan.backends.triton.common.overlap import begin
from triplan.backends.triton.common.philox_kernels import words_of
from triplan.backends.triton.common.tables_kernels import (
    address_of,
    chunk_of,
    load_stream,
    shift_of,
    shifted,
    shifted_count,
    store_stream,
)

#: Bits of FLAGS.
DECOUPLED = tl.constexpr(1)
AMSGRAD = tl.constexpr(2)
MOMENTUM = tl.constexpr(4)
NESTEROV = tl.constexpr(8)


@jit
def count_kernel(steps, tensors, found_inf, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """steps += 1, unless found_inf is not 0. steps: f32 [tensors]; found_inf: f32 [1] or None."""
    begin(OVERLAPS)
    if found_inf is not None:
        if tl.load(found_inf) != 0.0:
            return
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(steps + at, tl.load(steps + at, mask=at < tensors) + 1.0, mask=at < tensors)


@jit
def adam_scalars(hyper, step, FLAGS: tl.constexpr):
    """The f32 scalars of ``adam``, from hyper (f64): lr, beta1, beta2, eps, weight decay.

    Powers are computed in f64: f32's 0.999 to the power 1e5 has a relative error of 1e-3.
    """
    lr, beta1, beta2 = tl.load(hyper), tl.load(hyper + 1), tl.load(hyper + 2)
    eps, decay = tl.load(hyper + 3), tl.load(hyper + 4)
    correction1 = 1.0 - tl.exp(step * tl.log(beta1))
    correction2 = 1.0 - tl.exp(step * tl.log(beta2))
    if DECOUPLED & FLAGS:
        decay = 1.0 - lr * decay
    return (
        (lr / correction1).to(tl.float32),
        beta1.to(tl.float32),
        (1.0 - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (1.0 - beta2).to(tl.float32),
        (1.0 / tl.sqrt(correction2)).to(tl.float32),
        eps.to(tl.float32),
        decay.to(tl.float32),
    )


@jit
def adam(p, g, m, v, largest, s, FLAGS: tl.constexpr):
    """p - lr / (1 - beta1**t) * m / (sqrt(v / (1 - beta2**t)) + eps), elementwise in f32; returns p and the states.

    Kingma and Ba, "Adam", 2015; DECOUPLED: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.
    """
    if DECOUPLED & FLAGS:
        p = p * s[7]
    else:
        g = g + s[7] * p
    m = s[1] * m + s[2] * g
    v = s[3] * v + s[4] * g * g
    if AMSGRAD & FLAGS:
        largest = tl.maximum(largest, v, propagate_nan=tl.PropagateNan.ALL)
        root = tl.sqrt_rn(largest)
    else:
        root = tl.sqrt_rn(v)
    return p - tl.div_rn(s[0] * m, root * s[5] + s[6]), m, v, largest


@jit
def sgd_scalars(hyper, step, FLAGS: tl.constexpr):
    """The f32 scalars of ``sgd``, from hyper (f64): lr, momentum, dampening, weight decay."""
    momentum, dampening = tl.load(hyper + 1), tl.load(hyper + 2)
    return (
        tl.load(hyper).to(tl.float32),
        momentum.to(tl.float32),
        (1.0 - dampening).to(tl.float32),
        tl.load(hyper + 3).to(tl.float32),
        step == 1.0,
    )


@jit
def sgd(p, g, m, v, largest, s, FLAGS: tl.constexpr):
    """p - lr * d with b = momentum * b + (1 - dampening) * g and d = b, elementwise in f32; returns p and the states.

    With Nesterov's momentum, d = g + momentum * b (Sutskever et al., 2013).
    """
    g = g + s[3] * p
    if MOMENTUM & FLAGS:
        # In the first step the buffer becomes g, without dampening, as in torch. Selected, as it may have held NaN.
        m = tl.where(s[4], g, s[1] * m + s[2] * g)
        g = g + s[1] * m if NESTEROV & FLAGS else m
    return p - s[0] * g, m, v, largest


@jit
def lion_scalars(hyper, step, FLAGS: tl.constexpr):
    """The f32 scalars of ``lion``, from hyper (f64): lr, beta1, beta2, weight decay."""
    lr, beta1, beta2 = tl.load(hyper), tl.load(hyper + 1), tl.load(hyper + 2)
    return (
        lr.to(tl.float32),
        beta1.to(tl.float32),
        (1.0 - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (1.0 - beta2).to(tl.float32),
        (1.0 - lr * tl.load(hyper + 3)).to(tl.float32),
    )


@jit
def lion(p, g, m, v, largest, s, FLAGS: tl.constexpr):
    """p * (1 - lr * decay) - lr * sign(beta1 * m + (1 - beta1) * g) (Chen et al., 2023), elementwise in f32."""
    c = s[1] * m + s[2] * g
    # Where c is 0 or NaN, both comparisons are false, and c itself is the sign.
    sign = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, c))
    return p * s[5] - s[0] * sign, s[3] * m + s[4] * g, v, largest


@jit
def _rounded_at_random(x, seed, stream, first, BLOCK: tl.constexpr):
    """bf16 of x (f32, elements ``first`` .. ``first + BLOCK``): the upper half after adding 16 random bits.

    A draw of four words serves 8 elements, which are a vector: each thread draws what it stores.
    """
    w0, w1, w2, w3 = words_of(seed, stream, first // 8 + tl.arange(0, BLOCK // 8).to(tl.int64))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    below = tl.join(words & 0xFFFF, words >> 16).reshape(BLOCK)
    bits = tl.add(x.to(tl.uint32, bitcast=True), below, sanitize_overflow=False)
    upper = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where(x == x, upper, x.to(tl.bfloat16))  # the sum may carry a NaN's bits into its sign


@jit
def _block(
    a,
    first,
    offset,
    mask,
    scale,
    s,
    seed,
    stream,
    TYPES: tl.constexpr,
    STATES: tl.constexpr,
    WHOLE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    RULE: tl.constexpr,
    FLAGS: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    p = load_stream(a[0], offset, mask, TYPES[0], WHOLE)
    g = load_stream(a[1], offset, mask, TYPES[1], WHOLE) * scale
    g = -g if MAXIMIZE else g
    m, v, largest = p, p, p
    if STATES > 0:
        m = load_stream(a[2], offset, mask, TYPES[2], WHOLE)
    if STATES > 1:
        v = load_stream(a[3], offset, mask, TYPES[3], WHOLE)
    if STATES > 2:
        largest = load_stream(a[4], offset, mask, TYPES[4], WHOLE)
    p, m, v, largest = RULE(p, g, m, v, largest, s, FLAGS)
    if COPIES:
        store_stream(a[2 + STATES], offset, p, mask, TYPES[2 + STATES], WHOLE)
    if seed is not None:
        p = _rounded_at_random(p, seed, stream, first, BLOCK)
    store_stream(a[0], offset, p, mask, TYPES[0], WHOLE)
    if STATES > 0:
        store_stream(a[2], offset, m, mask, TYPES[2], WHOLE)
    if STATES > 1:
        store_stream(a[3], offset, v, mask, TYPES[3], WHOLE)
    if STATES > 2:
        store_stream(a[4], offset, largest, mask, TYPES[4], WHOLE)


@jit
def update_kernel(
    chunks,
    starts,
    sizes,
    addresses,
    steps,
    columns,
    hyper,
    grad_scale,
    found_inf,
    seed,
    SCALARS: tl.constexpr,
    RULE: tl.constexpr,
    FLAGS: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    TYPES: tl.constexpr,
    STATES: tl.constexpr,
    COPIES: tl.constexpr,
    NARROWEST: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """p, states = RULE(p, g / grad_scale, states) for the elements of one of PARTS parts of a chunk, in f32.

    addresses: i64 [2 + STATES + COPIES, columns], of parameters, gradients, states and copies of the parameters, of
    TYPES; NARROWEST: one of the narrowest type; steps: f32 [tensors], counted by ``count_kernel``; hyper: f64, in the
    order of SCALARS; grad_scale, found_inf: f32 [1] or None; seed: i64 [1], or None if p is rounded to nearest. Nothing
    is written if found_inf is not 0.
    """
    begin(OVERLAPS)
    if found_inf is not None:
        if tl.load(found_inf) != 0.0:
            return
    tensor, column, first, rest = chunk_of(chunks, starts, sizes, columns, CHUNK, PARTS)
    a = ()  # loaded before a branch: behind it, each would wait for ``rest``
    for k in tl.static_range(len(TYPES)):
        a = a + (address_of(addresses, k, column, columns),)
    step = tl.load(steps + tensor)
    if PARTS > 1:
        if rest <= 0:
            return
    # One reciprocal instead of divisions: it is exact for the scales of a GradScaler, which are powers of two.
    scale = 1.0 if grad_scale is None else tl.div_rn(1.0, tl.load(grad_scale))
    s = SCALARS(hyper, step.to(tl.float64), FLAGS)
    if seed is not None:
        seed = tl.load(seed)
    stream = (tensor << 32) | step.to(tl.int64)
    shift = 0  # random bits are drawn for whole vectors of a tensor's elements
    if seed is None:
        shift = shift_of(a[NARROWEST], TYPES[NARROWEST])
    lists, joined = (), first * 0
    for k in tl.static_range(len(TYPES)):
        address = shifted(a[k], shift, TYPES[k])
        lists, joined = lists + (address,), joined | address
    count = shifted_count(rest, shift, CHUNK // PARTS)
    within = tl.arange(0, BLOCK)
    for i in range(0, tl.maximum(count, 1), BLOCK):  # there is an element: no branch
        at = first + i
        here = ()
        for k in tl.static_range(len(TYPES)):
            here = here + (shifted(lists[k], -at, TYPES[k]),)
        # Alignment is tested on the addresses themselves, so that no table can promise a wrong one.
        if ((joined % 16) == 0) & (at >= shift) & (i + BLOCK <= count):
            _block(
                here,
                at,
                within,
                None,
                scale,
                s,
                seed,
                stream,
                TYPES,
                STATES,
                True,
                MAXIMIZE,
                RULE,
                FLAGS,
                COPIES,
                BLOCK,
            )
        else:
            mask = (within >= shift - at) & (within < count - i)
            _block(
                here,
                at,
                within,
                mask,
                scale,
                s,
                seed,
                stream,
                TYPES,
                STATES,
                False,
                MAXIMIZE,
                RULE,
                FLAGS,
                COPIES,
                BLOCK,
            )
