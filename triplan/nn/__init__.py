"""Modules on top of ``triplan.functional``: what torch.nn has by these names, with its parameters and state dicts."""

from triplan._exports import export as _export
from triplan.nn.attention import *
from triplan.nn.batch_norm import *
from triplan.nn.conv import *
from triplan.nn.copies import *
from triplan.nn.elementwise import *
from triplan.nn.gemm import *
from triplan.nn.indexing import *
from triplan.nn.losses import *
from triplan.nn.norms import *
from triplan.nn.patching import *
from triplan.nn.pooling import *
from triplan.nn.random import *
from triplan.nn.rotary import *
from triplan.nn.softmax import *

_export(__name__)
