from triplan.functional.losses.cross_entropy import *
from triplan.functional.losses.linear_cross_entropy import *
from triplan.functional.losses.nll_loss import *
from triplan.functional.losses.token_log_probs import *
