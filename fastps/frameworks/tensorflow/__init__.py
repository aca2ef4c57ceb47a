# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow plugin; users import its names from fastps.tensorflow.

_ops.pyx        an operation that TensorFlow calls, and its tensors as arrays
calls.py        a call of Python within a graph
sums.py         push_pull of tensors, dense and sparse
collectives.py  the other operations
compression.py  Horovod's compress() and decompress()
training.py     the gradient tape; broadcasts of variables
optimizer.py    DistributedOptimizer, of Keras or of sessions
sessions.py     a hook and optimizers for TensorFlow 1's sessions
strategy.py     MirroredStrategy
"""
