"""Tools that hold a plan to its word, for triplan's own ops and for yours. Needs ``pip install triplan[testing]``.

- ``descriptors(cls)``: a hypothesis strategy of valid problems of any Descriptor class.
- ``args_for(desc, device, seed)``: args for a problem, laid out as it promises, between canaries, with hostile indices.
- ``mutations(desc)`` and ``check_refusals(plan)``: args that miss by one thing, and the error each must get.
- ``check_plan(plan)``: runs, compared with the float64 reference at the plan's own tolerance.
- ``oracle(desc, args)``: the reference in float64.
"""

from triplan.testing.args import PlacedArgs, args_for
from triplan.testing.check import CheckReport, check_plan
from triplan.testing.mutations import Mutation, check_refusals, mutations
from triplan.testing.oracle import magnitudes, oracle
from triplan.testing.strategies import descriptors, extents, layouts, shapes

__all__ = [
    "CheckReport",
    "Mutation",
    "PlacedArgs",
    "args_for",
    "check_plan",
    "check_refusals",
    "descriptors",
    "extents",
    "layouts",
    "magnitudes",
    "mutations",
    "oracle",
    "shapes",
]
