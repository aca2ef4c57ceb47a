# SPDX-License-Identifier: Apache-2.0
from typing_extensions import disjoint_base

@disjoint_base
class LinkOwner: ...

class Transport:
    def close(self, *, timeout_s: float = 10.0) -> None: ...
