from triplan.functional.elementwise.activations import *
from triplan.functional.elementwise.expressions import *
from triplan.functional.elementwise.maths import *
