# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of the transports over RDMA; runs where there is a device."""

from __future__ import annotations

from rdma_net import use_rdma

use_rdma()

from test_transport import *  # noqa: E402, F403
from test_unasked import (  # noqa: E402, F401
    test_a_message_that_says_to_be_small_and_is_not,
    test_a_sender_of_too_much_is_cut_off_and_named,
)
