from triplan.functional.pooling.resizing import *
from triplan.functional.pooling.windows import *
