from triplan.functional.reductions.functions import *
