"""Elementwise ops in plain torch, in float64, and their running errors."""

from triplan.backends.reference.elementwise.evaluate import compute, running
from triplan.backends.table import CheckRules, reference
from triplan.backends.triton.elementwise.accuracy import guarantee
from triplan.backends.triton.elementwise.entries import OPS

for _op, _elements in OPS.items():
    reference(op=_op, elements=_elements, guarantee=guarantee, checks=CheckRules(terms=running, signed=True))(compute)
