# SPDX-License-Identifier: Apache-2.0
"""Names of operations among members: what cannot travel is refused before anything starts."""

from __future__ import annotations

import os

import pytest

from fastps.collectives.channels import Channels
from fastps.errors import ConfigError


def test_a_name_with_surrogates_is_refused_with_a_cure():
    channels = Channels("world")
    with pytest.raises(
        ConfigError, match=r"'\\udce9t\\udce9' is not valid Unicode.*ascii\(name\)"
    ):
        channels.of(os.fsdecode(b"\xe9t\xe9"))
    assert not channels
    assert channels.of("café") == channels.of("café")
