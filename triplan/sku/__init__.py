"""WHO computes an op: the identity, guarantee and target of a kernel, as pure data."""

from triplan.sku._public import *
from triplan.sku.element import Element as Element, IndexElement as IndexElement, OptionalElement as OptionalElement
from triplan.sku.kinds import GPU_ARCHS as GPU_ARCHS, OptionalMath as OptionalMath
from triplan.sku.model import FrozenModel as FrozenModel, field as field
from triplan.sku.preference import NO_PREFERENCE as NO_PREFERENCE, Requirements as Requirements
from triplan.sku.support import SUPPORTED as SUPPORTED
from triplan.sku.target import TargetName as TargetName, interpreting as interpreting
