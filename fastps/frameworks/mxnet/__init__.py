# SPDX-License-Identifier: Apache-2.0
"""The MXNet plugin; users import its names from fastps.mxnet.

aliases.py   NumPy's old names, for MXNet 1.9.1 with a NumPy that has them no more
engine.py    operations pushed to MXNet's own engine, and their errors
sums.py      push_pull; BytePS's names for it
training.py  the optimizer, Gluon's trainer, parameters of one worker for all
validated.py trainers whose steps validators judge
store.py     the KVStore; beginning and end of the job
face.py      all names, imported when the first of them is used
"""
