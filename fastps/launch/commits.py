# SPDX-License-Identifier: Apache-2.0
"""The directory in which a job that may be restarted keeps its elastic commits."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping

from fastps.launch.options import Options

NAME = "FASTPS_COMMIT_DIR"


@contextlib.contextmanager
def kept_commits(options: Options, environment: Mapping[str, str]) -> Iterator[Options]:
    """Yield the options with a temporary directory for commits, unless the user names one.

    If none can be made the options stay as they are, and the first commit reports it.
    """
    with contextlib.ExitStack() as stack:
        is_given = NAME in {**environment, **dict(options.environment)}
        if options.restarts and not options.is_dry_run and not is_given:
            with contextlib.suppress(OSError):
                made = tempfile.TemporaryDirectory(prefix="fastps-commits-")
                words = (*options.environment, (NAME, stack.enter_context(made)))
                options = dataclasses.replace(options, environment=words)
        yield options
