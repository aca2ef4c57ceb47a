# SPDX-License-Identifier: Apache-2.0
"""Where BlueFog has its graphs."""

from fastps.bluefog.common import topology_util

__all__ = ["topology_util"]
