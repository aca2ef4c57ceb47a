# SPDX-License-Identifier: Apache-2.0
"""Rules of the user's: which functions a server imports, and none that a worker alone asks for."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from fastps.contract.rule import Rule
from fastps.errors import ConfigError


def find_own(rule: Rule, allowed: str) -> Any:
    """Return the function of a rule of the user's, None of others; allowed: names, by commas.

    Its module may be in the present folder too. Raises ConfigError for a name that is not allowed
    here, or leads to nothing.
    """
    if not rule.own:
        return None
    names = [name.strip() for name in allowed.split(",")]
    if rule.own not in names:
        raise ConfigError(
            f"rule {rule.own!r} is not among FASTPS_RULES={allowed!r} of this server: add it there"
        )
    module, _, name = rule.own.partition(":")
    try:
        if not {"", os.getcwd()} & set(sys.path):  # a server is started without (command_of())
            sys.path.append(os.getcwd())
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(
            f"rule {rule.own!r} cannot be imported on this server: {error}"
        ) from error
