"""Elementwise ops: the composed functions of ``tp.expr``, and the descriptors of named ops and of expressions."""

from triplan.descriptors.elementwise.problems import *
