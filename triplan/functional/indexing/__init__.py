from triplan.functional.indexing.gather import *
from triplan.functional.indexing.put import *
from triplan.functional.indexing.select import *
