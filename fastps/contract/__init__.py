# SPDX-License-Identifier: Apache-2.0
"""What all members agree on about a tensor before its first byte travels. Pure.

Decides how the server combines pushes (contract.py), which rule replaces the average (rule.py),
how elements are encoded (codec.py, and compression.py for what users write), how a tensor is cut
and who owns the pieces (partition.py). Knows no thread, clock, socket or process; the scheduler
compares contracts, servers and workers obey them.
"""
