"""Expressions in plain torch, in float64, and their running errors."""
