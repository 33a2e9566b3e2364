"""Optimizers that update all parameters of a device in two launches: torch's interfaces, on plans over lists."""

from triplan._exports import export as _export
from triplan.optim.adam import *
from triplan.optim.lion import *
from triplan.optim.sgd import *

_export(__name__)
