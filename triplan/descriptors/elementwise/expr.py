"""``tp.expr``: user-defined expressions, such as ``tp.expr.silu(a) * b + c`` with ``a = tp.expr.operand("a")``.

It holds the functions of the maths table and the ops composed of them. Parameters without a default are operands; the
others are numbers in Args of a named op, and constants if a number is given here. Each public function is also a named
op.
"""

from __future__ import annotations

import math

from triplan.descriptors.expressions.expression import Expr, Operand, call, operand as operand
from triplan.descriptors.expressions.functions import *  # noqa: F403
from triplan.descriptors.expressions.functions import (
    abs,
    eq,
    isnan,
    log1pexp,
    normal_cdf,
    round,
    sigmoid,
    tanh,
    trunc,
    where,
)


# fmt: off
# --- unary ---
def square(x: Expr) -> Expr: return x * x
def frac(x: Expr) -> Expr: return x - trunc(x)
def logit_clamped(x: Expr, eps: Operand = 1e-6) -> Expr: return call("logit_clamped", x, eps)
def nan_to_num(x: Expr, nan: Operand = 0.0, posinf: Operand = math.inf, neginf: Operand = -math.inf) -> Expr:
    return where(isnan(x), nan, where(eq(x, math.inf), posinf, where(eq(x, -math.inf), neginf, x)))
# times = 10**decimals for decimals >= 0, else over = 10**-decimals; the other is 1.
def round_decimals(x: Expr, times: Operand = 1.0, over: Operand = 1.0) -> Expr:
    return round(x * times / over) * over / times

# --- activations ---
def relu(x: Expr) -> Expr: return where(x <= 0, 0, x)
def relu6(x: Expr) -> Expr: return hardtanh(x, 0, 6)
def relu_squared(x: Expr) -> Expr: return relu(x) * relu(x)
def leaky_relu(x: Expr, negative_slope: Operand = 0.01) -> Expr: return where(x > 0, x, x * negative_slope)
def elu(x: Expr, alpha: Operand = 1.0, scale: Operand = 1.0, input_scale: Operand = 1.0) -> Expr:
    return call("elu", x, alpha, scale, input_scale)
def selu(x: Expr) -> Expr: return elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)
def celu(x: Expr, alpha: Operand = 1.0) -> Expr: return elu(x, alpha, 1.0, 1 / alpha)
def gelu(x: Expr) -> Expr: return x * normal_cdf(x)
def gelu_tanh(x: Expr) -> Expr: return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x)))
def silu(x: Expr) -> Expr: return x * sigmoid(x)
def mish(x: Expr) -> Expr: return x * call("tanh_log1pexp", x)
def hardswish(x: Expr) -> Expr: return x * hardsigmoid(x)
def hardsigmoid(x: Expr) -> Expr: return where(x <= -3, 0, where(x >= 3, 1, (x + 3) * (1 / 6)))
def hardtanh(x: Expr, min_val: Operand = -1, max_val: Operand = 1) -> Expr:
    return where(x <= min_val, min_val, where(x >= max_val, max_val, x))
def hardshrink(x: Expr, lambd: Operand = 0.5) -> Expr: return where(abs(x) <= lambd, 0, x)
def softshrink(x: Expr, lambd: Operand = 0.5) -> Expr:
    return where(abs(x) <= lambd, 0, where(x > 0, x - lambd, x + lambd))
def tanhshrink(x: Expr) -> Expr: return x - tanh(x)
def softplus(x: Expr, beta: Operand = 1.0, threshold: Operand = 20.0) -> Expr:
    return where(x * beta > threshold, x, log1pexp(where(x * beta > threshold, 0, x * beta)) * (1 / beta))
def softsign(x: Expr) -> Expr: return x / (1 + abs(x))
def logsigmoid(x: Expr) -> Expr: return -log1pexp(-x)
def threshold(x: Expr, threshold: Operand = 0, value: Operand = 0) -> Expr: return where(x <= threshold, value, x)
# (1 / cap is computed once per thread; x / cap would be a division of each element.)
def softcap_tanh(x: Expr, cap: Operand = 30.0) -> Expr: return cap * tanh(x * (1 / cap))

# --- binary ---
def add_scaled(x: Expr, y: Expr, alpha: Operand = 1) -> Expr: return x + y * alpha
def sub_scaled(x: Expr, y: Expr, alpha: Operand = 1) -> Expr: return x - y * alpha
def clamp_min(x: Expr, y: Expr) -> Expr: return where((x < y) | isnan(y), y, x)
def clamp_max(x: Expr, y: Expr) -> Expr: return where((x > y) | isnan(y), y, x)
def prelu(x: Expr, y: Expr) -> Expr: return where(x > 0, x, x * y)
def glu(x: Expr, y: Expr) -> Expr: return x * sigmoid(y)
def swiglu(x: Expr, y: Expr) -> Expr: return silu(x) * y
def geglu(x: Expr, y: Expr) -> Expr: return gelu(x) * y
def reglu(x: Expr, y: Expr) -> Expr: return relu(x) * y

# --- ternary ---
# Two formulas, so that a weight of 1 gives y exactly.
def lerp(x: Expr, y: Expr, z: Expr) -> Expr: return where(abs(z) < 0.5, x + z * (y - x), y - (y - x) * (1 - z))
def addcmul(x: Expr, y: Expr, z: Expr, value: Operand = 1) -> Expr: return x + y * z * value
def addcdiv(x: Expr, y: Expr, z: Expr, value: Operand = 1) -> Expr: return x + y / z * value
# fmt: on
