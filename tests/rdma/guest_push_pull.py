# SPDX-License-Identifier: Apache-2.0
"""Engines and stores over RDMA, by the conformance suite; runs where there is a device."""

from __future__ import annotations

from rdma_net import use_rdma

use_rdma()

from test_push_pull import *  # noqa: E402, F403
