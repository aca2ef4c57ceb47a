# SPDX-License-Identifier: Apache-2.0
"""A backend for the trainers of Ray Train, whose workers then call fastps.init().

Ray makes one Backend in the process that controls a run, and calls it before the workers begin,
and after they ended; a run that is started again after a failure gets a job of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ray.train.backend import Backend as RayBackend
from ray.train.backend import BackendConfig

from fastps.frameworks.ray.job import TIMEOUT_S, Job


@dataclasses.dataclass
class Config(BackendConfig):  # type: ignore[misc]
    """What a trainer takes as backend_config, or torch_config: how its job is to be.

    servers, resources_per_server, settings: of Job. timeout_s: how long the cluster may take to
    make room for the servers. backend is for TorchTrainer, which wants to read one.
    """

    servers: int = 0
    resources_per_server: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"CPU": 1}
    )
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    timeout_s: float = TIMEOUT_S
    backend: str = "fastps"

    @property
    def backend_cls(self) -> type[Backend]:
        """Return the class that does it."""
        return Backend


class Backend(RayBackend):  # type: ignore[misc]
    """Starts the job of a run and ends it; called by Ray alone."""

    def __init__(self) -> None:
        self._job: Job | None = None

    def on_start(self, worker_group: Any, backend_config: Config) -> None:
        """Start scheduler and servers, and tell each worker who it is."""
        self._close()
        self._job = Job(
            len(worker_group),
            worker_group.execute_single_async,
            servers=backend_config.servers,
            resources_per_server=backend_config.resources_per_server,
            settings=backend_config.settings,
            timeout_s=backend_config.timeout_s,
        )

    def on_shutdown(self, worker_group: Any, backend_config: Config) -> None:
        """Let the workers leave, those that are still there, and end the job."""
        self._close()

    def _close(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.close()
