# SPDX-License-Identifier: Apache-2.0
"""docs/env.md is what the table of settings prints."""

from __future__ import annotations

from house_source import ROOT, package_files, text_of

from fastps import config
from fastps.config.__main__ import markdown


def test_env_page_is_generated():
    page = (ROOT / "docs" / "env.md").read_text(encoding="utf-8")
    assert page == markdown(), (
        "docs/env.md is out of date; run: python -m fastps.config --markdown > docs/env.md"
    )


def test_every_setting_has_a_reader():
    """A setting that nobody reads is to be deleted."""
    text = "".join(text_of(path) for path in package_files() if path.parent.name != "config")
    unread = [s.field for s in config.SETTINGS if f".{s.field}" not in text]
    allowed = {"token", "token_file", "insecure"}  # read by Config.token_bytes
    assert set(unread) <= allowed, f"no room reads {sorted(set(unread) - allowed)}"
