"""The tests' oracle and the CPU backend, in plain torch. Importing it imports all its modules, to register them."""

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
