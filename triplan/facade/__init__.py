"""What users hold: plans, their args, workspaces, caches."""

from triplan.facade.attention import *
from triplan.facade.batch_norm import *
from triplan.facade.cache import *
from triplan.facade.conv import *
from triplan.facade.copies import *
from triplan.facade.elementwise import *
from triplan.facade.gemm import *
from triplan.facade.indexing import *
from triplan.facade.losses import *
from triplan.facade.norms import *
from triplan.facade.optim import *
from triplan.facade.plan import *
from triplan.facade.pooling import *
from triplan.facade.prepared import *
from triplan.facade.random import *
from triplan.facade.reductions import *
from triplan.facade.rotary import *
from triplan.facade.sampling import *
from triplan.facade.scans import *
from triplan.facade.softmax import *
from triplan.facade.sorting import *
from triplan.facade.tune import *
from triplan.facade.workspace import *
