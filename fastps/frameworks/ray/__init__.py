# SPDX-License-Identifier: Apache-2.0
"""Jobs whose processes are actors of a Ray cluster; users import its names from fastps.ray.

job.py      scheduler and servers of a job, and the settings of its workers
train.py    the same for Ray Train: a backend for its trainers
"""

from fastps.frameworks import require

require("ray")
