"""Quotients and remainders of the maths table. The arguments of a function have one type: f32, f64 or an integer."""

# mypy: ignore-errors
# (Triton's language is not typed; these bodies are compiled, not executed as Python.)

import triton.language as tl
from triton.language.extra import libdevice

from triplan.backends.runtime.jit import jit

# fmt: off


@jit
def div(x, y):
    # ``/`` of f32 is div.full.f32, which has an error of 2 ulp and gives 0 for divisors beyond 2**126.
    if x.dtype != tl.float32:
        found = x / y
    elif y.type.is_block():
        found = tl.div_rn(x, y)
    elif y == 1.0:  # one number for all, as 10**0 of round_decimals
        found = x
    else:
        found = tl.div_rn(x, y)
    return found


@jit
def trunc(x): return x if x.dtype.is_int() else libdevice.trunc(x)


@jit
def some(found):
    """Whether any of ``found`` is true: in the whole program, so that it may branch."""
    return tl.max(found.to(tl.int32)) > 0 if found.type.is_block() else found


@jit
def _is_long(x):
    """Whether integers do not fit in 32 bits. (-2**31 does, but divided by -1 it overflows.)"""
    return (x > 2147483647) | (x < -2147483647)


@jit
def _quotient(x, y):
    """x / y rounded towards 0, of integers, y not 0. Of 64 bits a thread calls a function for each; so a program whose
    integers all fit divides them in 32 bits."""
    if x.dtype != tl.int64:
        found = x // y
    elif some(_is_long(x) | _is_long(y)):
        found = x // y
    else:
        found = (x.to(tl.int32) // y.to(tl.int32)).to(tl.int64)
    return found


@jit
def truncate_divide(x, y):
    """x / y rounded towards 0. Integers divided by 0 give 0."""
    if x.dtype.is_int():
        found = tl.where(y == 0, 0, _quotient(x, tl.where(y == 0, 1, y)))
    else:
        found = trunc(div(x, y))
    return found


@jit
def _are_far(quotient, y):
    """Whether some f32 quotients, as ``fast_dividef`` gives them, are too large for ``_rest``, or not finite as their
    divisors are subnormal, or 0 as these are beyond 2**126.

    Then all of the program computes ``_far_fmod``: both are exact, and results to choose from would hold registers.
    """
    return some(~((tl.abs(quotient) <= 1048576.0) & (tl.abs(y) <= 8.507059173023462e37)))


@jit
def _rest(x, y, times):
    """x - times * y, exactly, for ``times`` within 3/4 of x / y, which is at most 2**20: it is smaller than y and a
    multiple of the last bits of x or y. So is its sum with y where that is nearer to 0, or y the larger one."""
    # (Multiplied by -1, LLVM makes it an operand's sign; -times is a subtraction from 0.)
    return tl.fma(times * -1.0, y, x)


@jit
def _far_fmod(x, y):
    """In f64, where subnormal f32 are normal, and where libdevice subtracts bit by bit."""
    return libdevice.fmod(x.to(tl.float64), y.to(tl.float64)).to(tl.float32)


@jit
def _is_other_side(rest, y): return (rest != 0) & ((y < 0) != (rest < 0))


@jit
def _floor_divide(x, y, rest):
    quotient = div(x - rest, y)
    quotient = tl.where(_is_other_side(rest, y), quotient - 1, quotient)
    down = tl.floor(quotient)
    down = tl.where(quotient - down > 0.5, down + 1, down)
    # Zeros and infinities have the sign of x / y, without a second division.
    found = tl.where(quotient != 0, down, libdevice.copysign(quotient * 0, x) * tl.where(y < 0, -1.0, 1.0))
    return tl.where(y == 0, x * libdevice.copysign(y + float("inf"), y), found)


@jit
def floor_divide(x, y):
    """x / y rounded down; for floats from the remainder, as in torch, because x / y may round up to an integer."""
    if x.dtype.is_int():
        quotient = truncate_divide(x, y)
        found = quotient - ((y != 0) & (quotient * y != x) & ((x < 0) != (y < 0))).to(x.dtype)
    elif x.dtype == tl.float64:
        found = _floor_divide(x, y, fmod(x, y))
    else:
        quotient = libdevice.fast_dividef(x, y)
        if _are_far(quotient, y):
            found = _floor_divide(x, y, _far_fmod(x, y))
        else:
            times = libdevice.rint(quotient)
            times = tl.where(_is_other_side(_rest(x, y, times), y), times - 1, times)
            found = tl.where(times != 0, times, quotient * 0)  # which has the sign of x / y
    return found


@jit
def fmod(x, y):
    """x - y * trunc(x / y), exactly."""
    if x.dtype.is_int():
        found = x - truncate_divide(x, y) * y
    elif x.dtype == tl.float64:
        found = libdevice.fmod(x, y)
    else:
        a, b = tl.abs(x), tl.abs(y)
        quotient = libdevice.fast_dividef(a, b)
        if _are_far(quotient, b):
            found = _far_fmod(x, y)
        else:
            rest = _rest(a, b, libdevice.rint(quotient))
            found = libdevice.copysign(tl.where(rest < 0, rest + b, rest), x)
    return found


@jit
def remainder(x, y):
    """x - y * floor(x / y), which has the sign of y; 0 has that of x."""
    if x.dtype != tl.float32:
        rest = fmod(x, y)
    else:
        quotient = libdevice.fast_dividef(x, y)
        if _are_far(quotient, y):
            rest = _far_fmod(x, y)
        else:
            rest = _rest(x, y, libdevice.rint(quotient))
            rest = tl.where(rest != 0, rest, x * 0)
    return tl.where(_is_other_side(rest, y), rest + y, rest)
