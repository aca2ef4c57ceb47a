# SPDX-License-Identifier: Apache-2.0
"""The JAX plugin; users import its names from fastps.jax.

_ffi.pyx            the handler that XLA calls, and its buffers as arrays
calls.py            calls of Python within a compiled program
sums.py             push_pull of pytrees, at once or as start and finish
optimizer.py        distributed() for optax; broadcasts of pytrees
async_training.py   the same with parameters that servers hold
collectives.py      the other operations
"""
