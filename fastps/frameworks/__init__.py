# SPDX-License-Identifier: Apache-2.0
"""Plugins: the operations of fastps on the tensors of other frameworks.

Decides how a framework's tensors become arrays, when gradients leave and when a step waits for
them. Must never know sockets, frames or keys: operations start in ops/ and session/. Threads:
those of the framework.
Read gradient_round.py (one round of gradients), array_exchange.py (lists of arrays in buckets),
elastic.py and elastic_views.py (training that continues after a loss), then the folder of a
framework.
"""

import importlib.util
import sys

# What is not installed by its own name alone.
_INSTALL = {
    "torch": "pip install torch, for CPUs alone with --index-url "
    "https://download.pytorch.org/whl/cpu",
    "ray": "pip install 'fastps[ray]'",
}


def require(module: str) -> None:
    """Raise an error that says how to install a framework, where it is missing."""
    if module not in sys.modules and importlib.util.find_spec(module) is None:
        text = f"{module} is not installed; run: {_INSTALL[module]}"
        raise ModuleNotFoundError(text, name=module)
