"""WHAT is to be computed: frozen models, one module for each family of ops."""

from triplan.descriptors._public import *
from triplan.descriptors.fields import *
from triplan.descriptors.layout import PACKED as PACKED, is_packed as is_packed, packed_strides as packed_strides
