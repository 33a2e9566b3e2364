"""The names of this package that ``triplan`` lists too."""

from triplan.sku.element import *
from triplan.sku.guarantee import *
from triplan.sku.kernel_sku import *
from triplan.sku.kinds import *
from triplan.sku.preference import *
from triplan.sku.support import *
from triplan.sku.target import *
