# SPDX-License-Identifier: Apache-2.0
"""The backend "fastps" of torch.distributed, and a communication hook for torch's own DDP.

backend.py           registration, and what init_process_group() makes
store_rendezvous.py  how its default group joins a job
process_group.py     its operations, and the two classes that torch can use
tensor_layout.py     their tensors as flat arrays
work.py              what torch gets for an operation: Work and Future
comm_hook.py         gradients of torch's own DistributedDataParallel
"""
