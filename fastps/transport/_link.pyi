# SPDX-License-Identifier: Apache-2.0
from typing_extensions import disjoint_base

@disjoint_base
class LinkOwner: ...
