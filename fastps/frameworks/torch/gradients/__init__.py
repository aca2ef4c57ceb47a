# SPDX-License-Identifier: Apache-2.0
"""One round of gradients: from hooks on parameters to averages in .grad.

buckets.py         where gradients lie and how they travel: side by side, or each by itself
exchange.py        hooks on parameters, one round of gradients
accumulation.py    with op=Sum: what was added up in earlier rounds
backward_end.py    when a backward pass is over, in autograd's engine or a compiled one
sparse.py          gradients that are sparse
module_buffers.py  buffers of a module on all ranks as on one
data_parallel.py   DistributedDataParallel
no_compile.py      what torch.compile must not trace
unwrapped.py       optimizers that nobody wrapped are noticed
"""
