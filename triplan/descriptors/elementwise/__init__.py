"""Elementwise ops: the maths table, expressions over it, and the descriptors of named ops and of expressions."""

from triplan.descriptors.elementwise.problems import *
