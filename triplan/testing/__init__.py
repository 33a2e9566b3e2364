"""Tests of a plan against its guarantee, for triplan's own ops and for yours. Needs ``pip install triplan[testing]``.

- ``descriptors(cls)``: a hypothesis strategy of valid problems of any Descriptor class.
- ``args_for(desc, device, seed)``: args with exactly the promised layouts, between canaries, with invalid indices too.
- ``check_plan(plan)``: runs a plan and compares with the float64 reference at the plan's own tolerance.
- ``mutations(desc)`` and ``check_refusals(plan)``: args with exactly one fault, and the error that each must raise.
- ``wrong_results(desc, args, guarantees)``: results that are wrong in one thing, which a sharp tolerance tells apart.
- ``oracle(desc, args)``: the reference in float64.
"""

from triplan._exports import export as _export
from triplan.testing.args import *
from triplan.testing.check import *
from triplan.testing.mutations import *
from triplan.testing.oracle import *
from triplan.testing.strategies import *

_export(__name__)
