"""Expressions over the maths table, which several families compute: trees, their elements, their gradients."""
