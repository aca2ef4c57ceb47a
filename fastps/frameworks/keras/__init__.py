# SPDX-License-Identifier: Apache-2.0
"""The Keras 3 plugin, for all its back ends; users import its names from fastps.keras.

optimizer.py    DistributedOptimizer, and models that are loaded with it
callbacks.py    callbacks for model.fit()
values.py       operations on values, between two batches
variables.py    the parts that depend on the back end
elastic.py      states and callbacks of elastic training
"""
