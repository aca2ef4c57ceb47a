# SPDX-License-Identifier: Apache-2.0
"""The operations of fastps.torch on tensors.

tensors.py       torch tensors as arrays, and back
push_pull.py     push_pull in four forms
collectives.py   Horovod's collectives, in place and not
autograd.py      operations that autograd can differentiate
broadcast.py     parameters, optimizer states and values of one rank for all
wire_tensors.py  the memory that a collective reads and writes
compression.py   half types and codecs
batchnorm.py     SyncBatchNorm
pytrees.py       nested structures of tensors
"""
