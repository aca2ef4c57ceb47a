# SPDX-License-Identifier: Apache-2.0
"""Plugins: the operations of fastps on the tensors of other frameworks.

Decides how a framework's tensors become arrays, when gradients leave and when a step waits for
them. Must never know sockets, frames or keys: operations start in ops/ and session/. Threads:
those of the framework.
Read gradient_round.py (one round of gradients), array_exchange.py (lists of arrays in buckets),
elastic.py and elastic_views.py (training that continues after a loss), then the folder of a
framework.
"""
