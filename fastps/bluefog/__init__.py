# SPDX-License-Identifier: Apache-2.0
"""BlueFog's names: programs written for it run with `bluefog` changed to `fastps.bluefog`.

import fastps.bluefog.torch as bf
from fastps.bluefog.common import topology_util
"""
