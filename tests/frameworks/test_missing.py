# SPDX-License-Identifier: Apache-2.0
"""A framework that is not installed: the error has the command that installs it."""

from __future__ import annotations

import sys

import pytest

from fastps.frameworks import require


def test_a_missing_framework_names_its_command():
    with pytest.raises(ModuleNotFoundError, match="no_such is not installed; run: pip install no"):
        require("no_such")


def test_a_framework_that_is_loaded_is_not_looked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "no_such", None)
    require("no_such")
