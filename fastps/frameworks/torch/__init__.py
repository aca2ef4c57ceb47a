# SPDX-License-Identifier: Apache-2.0
"""The PyTorch plugin; users import its names from fastps.torch.

tensors.py       torch tensors as arrays, submits
ops.py           push_pull in four forms, its gradient
broadcast.py     values of one rank for all
compression.py   half types on the wire
buckets.py       where gradients lie and how they travel: side by side, or each by itself
agreement.py     do all workers have the same model?
exchange.py      hooks on parameters, one round of gradients
steps.py         an optimizer's class and its step()
synchronized.py  an optimizer that waits for gradients before it steps
crossing.py      CrossBarrier: one that does not
pipelined.py     PipeSGD: one that applies them a step later
asynchronous.py  servers hold the parameters
optimizer.py     DistributedOptimizer and CrossBarrier: which of them
sums.py          with op=Sum: what was added up in earlier rounds
buffers.py       buffers of a module on all ranks as on one
parallel.py      DistributedDataParallel
neighbors.py     operations among neighbours
decentralized.py optimizers that average models with them
local_sgd.py     steps of one's own, and now and then an exchange of what they changed
validated.py     the same, judged by validators
comm_hook.py     gradients of torch's own DistributedDataParallel
backend.py       torch.distributed's backend "fastps"
meeting.py       how its default group joins a job
process_group.py its operations, and the two classes that torch can use
memory.py        their tensors as flat arrays
work.py          what torch gets for an operation: Work and Future
"""
