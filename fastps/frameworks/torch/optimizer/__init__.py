# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer and CrossBarrier.

distributed.py    options, and the choice of one of the classes below
step_common.py    what all of them share
synchronous.py    step() waits for averaged gradients
cross_barrier.py  step() does not wait
pipesgd.py        averages are applied one step later
server_held.py    servers hold the parameters
adasum.py         steps are combined by Adasum
weight_check.py   comparison of all workers' models
"""
