# SPDX-License-Identifier: Apache-2.0
"""Run fastps-bench as `python -m fastps.bench`."""

import sys

from fastps.bench.main import main

sys.exit(main())
