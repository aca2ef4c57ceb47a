# SPDX-License-Identifier: Apache-2.0
"""The PyTorch plugin; users import its names from fastps.torch.

tensors.py       torch tensors as arrays, submits
ops.py           push_pull in four forms, its gradient
broadcast.py     values of one rank for all
compression.py   half types on the wire
optimizer.py     DistributedOptimizer
"""
