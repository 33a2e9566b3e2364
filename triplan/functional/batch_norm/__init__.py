from triplan.functional.batch_norm.calls import *
