"""Gather, scatter and embedding against torch's own ops: the cases, and what times them."""
