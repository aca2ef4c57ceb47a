# SPDX-License-Identifier: Apache-2.0
from typing import Self, final

from fastps.transport.rdma._transport import VerbsDevice

@final
class NativeDevice(VerbsDevice):
    def __new__(
        cls,
        name: str,
        *,
        port: int,
        gid_index: int,
        mtu: int = 0,
        traffic_class: int = 0,
        ack_timeout: int = 18,
        retries: int = 6,
    ) -> Self: ...
