from triplan.functional.random.dropout import *
from triplan.functional.random.numbers import *
