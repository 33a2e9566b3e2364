from triplan.functional.indexing.copies import *
from triplan.functional.indexing.embedding import *
from triplan.functional.indexing.gather import *
from triplan.functional.indexing.normed_embedding import *
from triplan.functional.indexing.put import *
from triplan.functional.indexing.reduce import *
from triplan.functional.indexing.select import *
