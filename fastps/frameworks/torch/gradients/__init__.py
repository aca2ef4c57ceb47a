# SPDX-License-Identifier: Apache-2.0
"""One round of gradients: from hooks on parameters to averages in .grad.

exchange.py        hooks on parameters, one round of gradients
buckets.py         memory of gradients: side by side, or each by itself
accumulation.py    sums of earlier rounds, with op=Sum
backward_end.py    callbacks at the end of a backward pass
sparse.py          sparse gradients
module_buffers.py  a module's buffers, copied from one rank to all
data_parallel.py   DistributedDataParallel
no_compile.py      marks for code that torch.compile must not trace
unwrapped.py       detection of optimizers that were not wrapped
"""
