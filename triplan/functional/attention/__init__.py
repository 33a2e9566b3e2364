from triplan.functional.attention.calls import *
from triplan.functional.attention.packed import *
