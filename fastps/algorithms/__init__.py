# SPDX-License-Identifier: Apache-2.0
"""Training with rare exchanges, and parameters that servers hold.

Decides when workers exchange the changes of their local steps, and how these are applied: local
SGD and DiLoCo (local_sgd_base.py, local_sgd.py, async_local_sgd.py, outer.py, server_rounds.py),
parameters on servers (server_parameters.py; server_copies.py in elastic jobs), and parameters that
only validators change (held_parameters.py, validator.py, validated_steps.py, update_inbox.py).
Works on NumPy arrays; must never know a framework. Threads: the caller's, one per object.
"""
