# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers of NumPy against torch's, terms of local steps, and schedules of staleness."""

from __future__ import annotations

import numpy as np
import pytest

from fastps.algorithms import outer
from fastps.algorithms.async_local_sgd import Constant, Hinge, Polynomial
from fastps.algorithms.local_sgd_base import Terms


@pytest.mark.parametrize("kind", ["average", "nesterov", "adam"])
def test_steps_are_those_of_torch(kind):
    torch = pytest.importorskip("torch")
    ours, theirs = {
        "average": (outer.Outer(0.5), lambda x: torch.optim.SGD(x, lr=0.5)),
        "nesterov": (
            outer.Nesterov(0.7, 0.9),
            lambda x: torch.optim.SGD(x, lr=0.7, momentum=0.9, nesterov=True),
        ),
        "adam": (outer.Adam(0.01), lambda x: torch.optim.Adam(x, lr=0.01)),
    }[kind]
    random = np.random.default_rng(0)
    arrays = [random.normal(size=shape) for shape in ((3, 4), (5,), ())]
    tensors = [torch.tensor(one.copy()) for one in arrays]
    optimizer = theirs(tensors)
    for _ in range(5):
        gradients = [random.normal(size=one.shape) for one in arrays]
        for place, (one, gradient) in enumerate(zip(arrays, gradients, strict=True)):
            ours.step(place, one, gradient)
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = torch.tensor(gradient)
        optimizer.step()
        for one, tensor in zip(arrays, tensors, strict=True):
            np.testing.assert_allclose(one, tensor.numpy(), atol=1e-12)


def test_an_outer_optimizer_goes_on_from_what_it_kept():
    first, second = outer.Adam(0.1), outer.Adam(0.5)
    one = np.ones(3)
    first.step(0, one, np.array([1.0, 2.0, 3.0]))
    second.load_state_dict(first.state_dict())
    other = one.copy()
    for optimizer, array in ((first, one), (second, other)):
        optimizer.step(0, array, np.array([0.5, 0.0, -1.0]))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("make", "words"),
    [(outer.Outer, {"lr": 0.0}), (outer.Nesterov, {"momentum": 1.0}),
     (outer.Adam, {"betas": (0.9, 1.0)}), (outer.Adam, {"eps": 0.0})],
)  # fmt: skip
def test_parameters_that_mean_nothing_are_refused(make, words):
    with pytest.raises(ValueError, match=next(iter(words))):
        make(**words)


@pytest.mark.parametrize(
    "words",
    [{"participation": 0.0}, {"participation": 1.5}, {"sparsity": 1.0}, {"sparsity": -0.1},
     {"error_reset": "lost"}, {"seed": -1}, {"keep": 2.0}, {"delay": 4}, {"fragments": 5}],
)  # fmt: skip
def test_terms_that_cannot_be_are_refused(words):
    with pytest.raises(ValueError, match=next(iter(words))):
        Terms(sync_every=4, **words)


def test_lots_are_counters_with_the_frequencies_asked_for():
    terms = Terms(sync_every=4, participation=0.5, sparsity=0.2, seed=7)
    drawn = np.stack([terms.draw(4, 1, exchange, 6) for exchange in range(2000)])
    assert (drawn[3] == terms.draw(4, 1, 3, 6)).all()  # in any order
    assert (drawn[3] != terms.draw(4, 0, 3, 6)).any()  # another fragment has others
    # 8000 draws of a worker's part in it: a standard error of 0.0056
    assert abs(drawn.any(axis=2).mean() - 0.5) < 0.03
    assert abs(drawn.mean() - 0.5 * 0.8) < 0.03


def test_shares_fall_with_staleness_as_the_paper_says():
    assert [Constant(0.4)(s) for s in (0, 9)] == [0.4, 0.4]
    np.testing.assert_allclose([Polynomial(0.8, 0.5)(s) for s in (0, 3)], [0.8, 0.4])
    np.testing.assert_allclose([Hinge(0.6, 10, 4)(s) for s in (0, 4, 5)], [0.6, 0.6, 0.6 / 11])
