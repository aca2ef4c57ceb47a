# SPDX-License-Identifier: Apache-2.0
"""Links between any two members by RDMA; runs where there is a device."""

from __future__ import annotations

from rdma_net import use_rdma

use_rdma()

from test_peer_links import *  # noqa: E402, F403
