# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow plugin; users import its names from fastps.tensorflow.

_ops.pyx        an operation that TensorFlow calls, and its tensors as arrays
calls.py        a call of Python within a graph
sums.py         push_pull of lists of tensors, dense and sparse, in two halves
collectives.py  the other operations
training.py     the gradient tape; variables of one worker for all
optimizer.py    DistributedOptimizer, of Keras or of sessions
sessions.py     what TensorFlow 1's sessions are given
strategy.py     MirroredStrategy
"""
