# SPDX-License-Identifier: Apache-2.0
"""A framework that is not installed: the error has the command that installs it."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from fastps.frameworks import require


def test_a_missing_framework_names_its_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"ray is not.*pip install 'fastps\[ray\]'"):
        require("ray")


def test_a_framework_that_is_loaded_is_not_looked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    require("ray")
