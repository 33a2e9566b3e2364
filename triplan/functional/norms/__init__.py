from triplan.functional.norms.calls import *
