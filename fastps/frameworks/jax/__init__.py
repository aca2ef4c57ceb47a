# SPDX-License-Identifier: Apache-2.0
"""The JAX plugin; users import its names from fastps.jax.

_ffi.pyx        what XLA calls, and its buffers as arrays
calls.py        a call within a compiled program
sums.py         push_pull of pytrees, at once or as start and finish
optimizer.py    distributed() for optax; one worker's trees for all
collectives.py  the other operations
"""
