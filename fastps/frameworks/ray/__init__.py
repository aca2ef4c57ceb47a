# SPDX-License-Identifier: Apache-2.0
"""Jobs whose processes are actors of a Ray cluster; users import its names from fastps.ray.

job.py      the scheduler and the servers of a job, and what its workers are told
train.py    the same for Ray Train: a backend for its trainers
"""
