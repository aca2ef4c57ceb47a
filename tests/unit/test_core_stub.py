# SPDX-License-Identifier: Apache-2.0
"""Status table and documentation agree with the C module; tools/check compares its stub."""

from __future__ import annotations

import pytest

from aids import faces
from fastps import _core, errors


def test_status_codes_map_to_errors():
    codes = faces.status_codes()
    assert codes.pop("OK") == 0
    assert sorted(codes.values()) == sorted(errors.STATUS_ERRORS)
    assert errors.STATUS_ERRORS[codes["E_TIMEOUT"]] is errors.StallError
    assert errors.STATUS_ERRORS[codes["E_LINK_TIMEOUT"]] is errors.TransportTimeout
    assert errors.STATUS_ERRORS[codes["E_PEER_LOST"]] is errors.PeerLostError


@pytest.mark.parametrize("name", _core.__all__)
def test_public_names_are_documented(name):
    text = getattr(_core, name).__doc__
    assert text.splitlines()[0].endswith(".")


def test_theory_of_operation_opens_the_module():
    assert "Theory of operation" in _core.__doc__


def test_release_builds_have_no_counters():
    counters = _core.debug_counters()
    assert counters == {} or {"queues", "threads", "loans"} <= set(counters)
