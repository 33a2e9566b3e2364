"""Optimizers with torch's interfaces, on plans over lists: two launches update all parameters of a device."""

from triplan._exports import export as _export
from triplan.optim.adam import *
from triplan.optim.clip import *
from triplan.optim.foreach import *
from triplan.optim.lion import *
from triplan.optim.muon import *
from triplan.optim.sgd import *

_export(__name__)
