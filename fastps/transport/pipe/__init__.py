# SPDX-License-Identifier: Apache-2.0
"""Links between the ranks of one machine: a pipe each way, in memory that both have mapped."""
