# SPDX-License-Identifier: Apache-2.0
"""Rules of users: the functions that a server may import."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from fastps.contract.rule import Rule
from fastps.errors import ConfigError


def find_own(rule: Rule, allowed: str) -> Any:
    """Return the function of a user's rule, None for other rules; allowed: names, by commas.

    Its module may be in the current folder too. Raises ConfigError for a name that is not allowed
    here, or cannot be imported.
    """
    if not rule.own:
        return None
    names = [name.strip() for name in allowed.split(",")]
    if rule.own not in names:
        raise ConfigError(
            f"rule {rule.own!r} is not among FASTPS_RULES={allowed!r} of this server; add it there"
        )
    module, _, name = rule.own.partition(":")
    try:
        if not {"", os.getcwd()} & set(sys.path):  # a server is started without (command_of())
            sys.path.append(os.getcwd())
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(
            f"rule {rule.own!r} cannot be imported on this server: {error}; check its name"
        ) from error
