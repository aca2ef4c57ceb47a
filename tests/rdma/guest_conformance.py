# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of the transports over RDMA; runs where there is a device."""

from __future__ import annotations

from rdma_net import use_rdma

use_rdma()

from test_transport import *  # noqa: E402, F403
