"""Gather, scatter and their backward ops. Each module named after a kernel registers it; the others are shared."""
