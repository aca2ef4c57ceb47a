# SPDX-License-Identifier: Apache-2.0
"""Operations on torch tensors: what fastps.torch offers to call.

tensors.py       torch tensors as arrays of the engine, and back
push_pull.py     push_pull in four forms
collectives.py   Horovod's collectives, in place and not
autograd.py      their gradients
broadcast.py     values of one rank for all: parameters, optimizer states
wire_tensors.py  the memory that an operation reads and writes
compression.py   half types and codecs
batchnorm.py     SyncBatchNorm
pytrees.py       nested structures of tensors
"""
