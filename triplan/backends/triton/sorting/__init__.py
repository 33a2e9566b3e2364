"""Sorting of rows, their largest or smallest elements, and positions in sorted rows."""
