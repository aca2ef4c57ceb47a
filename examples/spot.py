# SPDX-License-Identifier: Apache-2.0
"""Training on machines that come and go: kill workers, by the pids that they print, and watch.

fastps-run -np 3 --min 1 --respawn 5 python examples/spot.py
"""

import os
import time

import numpy as np

import fastps
from fastps import elastic

fastps.init()
print(f"worker {fastps.rank()} of {fastps.size()} has pid {os.getpid()}", flush=True)
truth = np.linspace(-1, 1, 20)
state = elastic.State(weights=np.zeros(20), step=0)  # all that training needs to go on


@elastic.run
def train(state: elastic.State) -> None:
    """Fit a line; begins again with the present values when a worker has joined."""
    print(f"worker {fastps.rank()} of {fastps.size()} begins at step {state.step}", flush=True)
    rng = np.random.default_rng(state.step * fastps.size() + fastps.rank())
    while state.step < 400:
        x = rng.normal(size=(32, 20))  # data of its own
        gradient = x.T @ (x @ (state.weights - truth)) / 32
        state.weights -= 0.05 * fastps.push_pull(gradient, "gradient")
        state.step += 1
        time.sleep(0.02)  # time for you to kill a worker
        state.commit()  # here others join


train(state)
error = np.abs(state.weights - truth).max()
print(f"worker {fastps.rank()} of {fastps.size()} ends with an error of {error:.6f}", flush=True)
fastps.shutdown()
