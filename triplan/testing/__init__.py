"""Tools that hold a plan to its word, for triplan's own ops and for yours. Needs ``pip install triplan[testing]``.

- ``descriptors(cls)``: a hypothesis strategy of valid problems of any Descriptor class.
- ``args_for(desc, device, seed)``: args for a problem, laid out as it promises, between canaries, with hostile indices.
- ``mutations(desc)`` and ``check_refusals(plan)``: args that miss by one thing, and the error each must get.
- ``check_plan(plan)``: runs, compared with the float64 reference at the plan's own tolerance.
- ``oracle(desc, args)``: the reference in float64.
"""

from triplan._exports import export as _export
from triplan.testing.args import *
from triplan.testing.check import *
from triplan.testing.mutations import *
from triplan.testing.oracle import *
from triplan.testing.strategies import *

_export(__name__)
