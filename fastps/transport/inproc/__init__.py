# SPDX-License-Identifier: Apache-2.0
"""Links within one process: a frame is handed over, or lent, and no system call is made."""
