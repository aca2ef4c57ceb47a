# SPDX-License-Identifier: Apache-2.0
"""fastps for Ray. Only re-exports names.

    from ray.train.data_parallel_trainer import DataParallelTrainer
    import fastps.ray

    DataParallelTrainer(train, backend_config=fastps.ray.Config(servers=1), ...).fit()

The workers of that run call fastps.init(), or the init() of a framework's face. start() does the
same for actors without Ray Train.
"""

from __future__ import annotations

from fastps.frameworks.ray.job import (
    Job,
    start,
)
from fastps.frameworks.ray.train import (
    Backend,
    Config,
)

__all__ = ["Backend", "Config", "Job", "start"]
