# SPDX-License-Identifier: Apache-2.0
"""Where a job that may be started again keeps what it commits (the faces' `elastic`)."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping

from fastps.launch.options import Options

NAME = "FASTPS_COMMIT_DIR"


@contextlib.contextmanager
def kept_commits(options: Options, environment: Mapping[str, str]) -> Iterator[Options]:
    """Yield the options with a directory for commits, if there is none; gone in the end.

    Where none can be made it is without one: whoever commits then says so.
    """
    with contextlib.ExitStack() as stack:
        is_given = NAME in {**environment, **dict(options.environment)}
        if options.restarts and not options.is_dry_run and not is_given:
            with contextlib.suppress(OSError):
                made = tempfile.TemporaryDirectory(prefix="fastps-commits-")
                words = (*options.environment, (NAME, stack.enter_context(made)))
                options = dataclasses.replace(options, environment=words)
        yield options
