"""``python -m bench anywhere FAMILY``: drawn problems of a family, timed against torch and against every other entry.

A family joins by a module of its name, with ``draw`` and ``peers`` (``bench/anywhere/drawing.py`` says what they are).
"""
