# SPDX-License-Identifier: Apache-2.0
"""The conformance suite's net over RDMA, and what the other tests of a guest share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

CONFORMANCE = Path(__file__).parents[1] / "conformance"
if str(CONFORMANCE) not in sys.path:
    sys.path.insert(0, str(CONFORMANCE))

import transport_nets  # noqa: E402

from fastps.config import load  # noqa: E402
from fastps.transport import rdma  # noqa: E402
from fastps.transport._link import LinkOwner  # noqa: E402
from fastps.transport.rdma._transport import RdmaTransport, VerbsDevice  # noqa: E402

RDMA_NETS = ("native", "pyverbs")
PlainNet = transport_nets.Net
DATA_PATHS = os.environ.get("FASTPS_TEST_DATA_PATH", "native").split(",")


def open_device(data_path: str = DATA_PATHS[0]) -> VerbsDevice:
    """Open the guest's device over one data path."""
    return rdma.open_device(load({"rdma_data_path": data_path}, {}))


class RdmaNet(PlainNet):
    """One RDMA transport; other kinds are made as ever."""

    def __init__(self, kind: str, *, io_threads: int = 1) -> None:
        if kind not in RDMA_NETS:
            super().__init__(kind, io_threads=io_threads)
            return
        self.kind = kind
        self.inside = None
        self.transport: Any = RdmaTransport(open_device(kind), io_threads=io_threads)

    def connect(
        self,
        a: LinkOwner,
        peer_for_a: int,
        b: LinkOwner,
        peer_for_b: int,
        *,
        lane: int = 0,
        credit_bytes: int = 0,
        **others: Any,
    ) -> None:
        """Join two owners; the connection beside the queue pairs is a TCP one."""
        options = {"lane": lane, "credit_bytes": credit_bytes}
        if self.kind not in RDMA_NETS:
            super().connect(a, peer_for_a, b, peer_for_b, **options, **others)
            return
        near, far = transport_nets.tcp_pair()
        with near, far:
            openings = [
                self.transport.adopt(near.detach(), a, peer=peer_for_a, **options),
                self.transport.adopt(
                    far.detach(), b, peer=peer_for_b, greets_first=False, **options
                ),
            ]
        for opening in openings:
            opening.wait(timeout_s=transport_nets.TIMEOUT_S)


def use_rdma() -> None:
    """Let the conformance suite, imported afterwards, run over RDMA alone."""
    transport_nets.NETS[:] = DATA_PATHS
    transport_nets.TCP_NETS[:] = DATA_PATHS
    transport_nets.Net = RdmaNet  # type: ignore[misc]
