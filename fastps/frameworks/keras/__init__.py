# SPDX-License-Identifier: Apache-2.0
"""The Keras 3 plugin, for all its back ends; users import its names from fastps.keras.

optimizer.py    DistributedOptimizer, and models that are loaded with it
callbacks.py    what model.fit() is told
variables.py    what depends on the back end
"""
