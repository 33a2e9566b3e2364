"""Triton kernels, one folder per family. Importing this package imports all its modules: each registers its entries."""

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
