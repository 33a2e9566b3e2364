"""Benchmarks, run from the repository's root: ``python -m bench indexing``, ``python -m bench host``."""
