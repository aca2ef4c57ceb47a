# SPDX-License-Identifier: Apache-2.0
"""Operations among neighbours on a graph of workers: schedules, and what starts them."""
