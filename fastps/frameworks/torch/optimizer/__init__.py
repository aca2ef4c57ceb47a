# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer and CrossBarrier.

distributed.py    which of the classes below an optimizer becomes
step_common.py    an optimizer's class and its step()
synchronous.py    one that waits for gradients before it steps
cross_barrier.py  one that does not
pipesgd.py        one that applies them a step later
server_held.py    servers hold the parameters
adasum.py         one that adds steps by Adasum
weight_check.py   do all workers begin with the same model?
"""
