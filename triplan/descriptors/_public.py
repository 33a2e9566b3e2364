"""The names of this package that ``triplan`` lists too."""

from triplan.descriptors.attention import *
from triplan.descriptors.base import *
from triplan.descriptors.batch_norm import *
from triplan.descriptors.conv import *
from triplan.descriptors.copies import *
from triplan.descriptors.elementwise import *
from triplan.descriptors.gemm import *
from triplan.descriptors.indexing import *
from triplan.descriptors.layout import *
from triplan.descriptors.losses import *
from triplan.descriptors.norms import *
from triplan.descriptors.operand import *
from triplan.descriptors.optim import *
from triplan.descriptors.pooling import *
from triplan.descriptors.random import *
from triplan.descriptors.reductions import *
from triplan.descriptors.rotary import *
from triplan.descriptors.sampling import *
from triplan.descriptors.scans import *
from triplan.descriptors.softmax import *
from triplan.descriptors.sorting import *
