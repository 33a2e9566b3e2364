from triplan.functional.losses.cross_entropy import *
from triplan.functional.losses.linear_cross_entropy import *
from triplan.functional.losses.nll_loss import *
