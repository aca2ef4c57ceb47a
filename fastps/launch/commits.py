# SPDX-License-Identifier: Apache-2.0
"""Where a job that may be started again keeps what it commits (fastps.torch.elastic)."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping

from fastps.launch.options import Options

NAME = "FASTPS_COMMIT_DIR"


@contextlib.contextmanager
def kept_commits(options: Options, environment: Mapping[str, str]) -> Iterator[Options]:
    """Give the options with a directory for commits, if there is none; gone in the end."""
    is_given = NAME in {**environment, **dict(options.environment)}
    if not options.restarts or options.is_dry_run or is_given:
        yield options
        return
    with tempfile.TemporaryDirectory(prefix="fastps-commits-") as folder:
        words = (*options.environment, (NAME, folder))
        yield dataclasses.replace(options, environment=words)
