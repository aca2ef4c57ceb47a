# SPDX-License-Identifier: Apache-2.0
"""Optimizers and operations among neighbours on a graph of workers.

neighbors.py           operations among neighbours
optimizer.py           optimizers that average models with neighbours
corrections.py         gradient tracking, exact diffusion, DecentLaM, NoLoCo
windows.py             one-sided windows
window_optimizers.py   optimizers by windows
"""
