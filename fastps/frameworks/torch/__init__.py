# SPDX-License-Identifier: Apache-2.0
"""The PyTorch plugin; users import its names from fastps.torch.

ops/            tensors as arrays, collectives in their four forms, gradients of operations, codecs
gradients/      hooks on parameters, buckets, one round of gradients, DistributedDataParallel
optimizer/      DistributedOptimizer: synchronous, CrossBarrier, PipeSGD, parameters on servers
decentralized/  optimizers that average models with neighbours, windows
algorithms/     local SGD and DiLoCo, steps that validators judge
distributed/    the backend "fastps" of torch.distributed, a communication hook for its DDP
elastic.py, elastic_sampler.py, saved_states.py  training that continues after a loss
"""

from fastps.frameworks import require

require("torch")
