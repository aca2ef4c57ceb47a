# SPDX-License-Identifier: Apache-2.0
"""BlueFog's place of its graphs: bluefog.common.topology_util."""

from fastps.bluefog.common import topology_util

__all__ = ["topology_util"]
