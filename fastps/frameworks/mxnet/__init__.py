# SPDX-License-Identifier: Apache-2.0
"""The MXNet plugin; users import its names from fastps.mxnet.

aliases.py   NumPy's old names, which MXNet 1.9.1 needs
engine.py    operations pushed to MXNet's own engine, and their errors
sums.py      push_pull, BytePS's names for it, the other operations
training.py  the optimizer, Gluon's trainer, broadcasts of parameters
validated.py trainers whose updates validators judge
store.py     the KVStore, and init()
"""
