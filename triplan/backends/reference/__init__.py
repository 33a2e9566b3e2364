"""The oracle and the CPU backend: plain torch, written from the definitions."""
