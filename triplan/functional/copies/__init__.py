from triplan.functional.copies.conversions import *
from triplan.functional.copies.joins import *
from triplan.functional.copies.masks import *
from triplan.functional.copies.moves import *
from triplan.functional.copies.numbers import *
