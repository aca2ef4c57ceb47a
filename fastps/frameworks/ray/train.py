# SPDX-License-Identifier: Apache-2.0
"""A backend for the trainers of Ray Train, whose workers then call fastps.init().

Ray creates one Backend in the process that controls a run. It calls the backend before the workers
begin and after they have ended. A run that restarts after a failure gets a new job.
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
    """The backend_config, or torch_config, of a trainer.

    servers, resources_per_server, settings: of Job. timeout_s: of Job, for the cluster to make
    room for the servers. backend is only a name for TorchTrainer.
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
        """Return the class of the backend."""
        return Backend


class Backend(RayBackend):  # type: ignore[misc]
    """Starts the job of a run and ends it; called by Ray alone."""

    def __init__(self) -> None:
        self._job: Job | None = None

    def on_start(self, worker_group: Any, backend_config: Config) -> None:
        """Start scheduler and servers, and configure the workers."""
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
        """Let the remaining workers leave, and end the job."""
        self._close()

    def _close(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.close()
