# SPDX-License-Identifier: Apache-2.0
"""The README's table of frameworks: each cell is what a test shows, with the versions tested."""

from __future__ import annotations

import re

import pytest
from house_source import ROOT

COLUMNS = (
    "operations", "optimizer", "overlap", "compression", "process sets", "sparse gradients",
    "servers hold parameters",
)  # fmt: skip
# The test of each cell, file and function below tests/frameworks; None where it says no.
TESTS: dict[str, tuple[str | None, ...]] = {
    "PyTorch": (
        "test_torch_collectives.test_operations_equal_one_process",
        "test_torch_optimizer.test_two_workers_equal_one_process",
        "test_torch_optimizer.test_gradients_leave_during_backward_front_layers_most_urgent",
        "test_torch_compression.test_gradients_are_those_of_push_pull",
        "test_torch_collectives.test_operations_equal_one_process",
        "test_torch_horovod.test_gradients_are_those_of_one_process",
        "test_torch_async.test_workers_of_any_speed_train_one_model",
    ),
    "TensorFlow": (
        "test_tensorflow.test_operations_have_gradients",
        "test_tensorflow.test_optimizers_of_keras_and_of_sessions",
        "test_tensorflow.test_a_tape_gives_the_same_on_all_workers",
        "test_tensorflow.test_a_tape_gives_the_same_on_all_workers",
        "test_tensorflow.test_operations_are_those_of_numpy",
        "test_tensorflow.test_operations_are_those_of_numpy",
        "test_tensorflow.test_optimizers_of_keras_and_of_sessions",
    ),
    "Keras 3": (
        "test_keras.test_all_frameworks_give_the_bits_of_numpy",
        "test_keras.test_fit_is_the_same_on_all_workers",
        "test_keras.test_fit_is_the_same_on_all_workers",
        "test_keras.test_passes_and_paces",
        "test_keras.test_passes_and_paces",
        "test_tensorflow.test_optimizers_of_keras_and_of_sessions",
        "test_keras.test_passes_and_paces",
    ),
    "JAX": (
        "test_jax.test_the_other_operations_and_errors",
        "test_jax.test_optax_steps_alike_everywhere",
        "test_jax.test_every_transformation_goes_through_it",
        "test_jax.test_optax_steps_alike_everywhere",
        "test_jax.test_the_other_operations_and_errors",
        None,
        "test_jax.test_servers_hold_parameters",
    ),
    "MXNet 1.9": (
        "test_mxnet.test_the_other_operations_and_errors",
        "test_mxnet.test_training_is_that_of_one_process",
        "test_mxnet.test_the_other_operations_and_errors",
        "test_mxnet.test_training_is_that_of_one_process",
        "test_mxnet.test_the_other_operations_and_errors",
        None,
        "test_mxnet.test_validators_judge_what_trainers_change",
    ),
}
PINS = {
    "TensorFlow": ("tensorflow", "tensorflow-cpu"),
    "Keras 3": ("keras", "keras"),
    "JAX": ("jax", "jax"),
    "MXNet 1.9": ("mxnet", "mxnet"),
}


def table() -> dict[str, list[str]]:
    """Give the cells of each row; the head of the table has no name."""
    lines = (ROOT / "README.md").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| | operations |"))
    rows = [line.strip("|").split("|") for line in lines[first:] if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    return {row[0]: row[1:] for row in cells[: 2 + len(TESTS)] if "---" not in row[0]}


def test_rows_and_columns_are_those_that_tests_are_named_for():
    found = table()
    assert tuple(found.pop("")) == (*COLUMNS, "tested with")
    assert list(found) == list(TESTS)


@pytest.mark.parametrize("framework", TESTS)
def test_a_cell_has_a_test_unless_it_says_no(framework):
    cells = table()[framework]
    for column, cell, test in zip(COLUMNS, cells[:-1], TESTS[framework], strict=True):
        is_no = cell == "no" or "has none" in cell
        assert is_no == (test is None), f"{framework}, {column}: {cell!r} and {test}"
        if test is not None:
            file, name = test.split(".")
            text = (ROOT / "tests" / "frameworks" / f"{file}.py").read_text()
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{test} is not there"


@pytest.mark.parametrize("framework", PINS)
def test_versions_are_those_that_are_installed_for_the_tests(framework):
    file, package = PINS[framework]
    pins = (ROOT / "tests" / "frameworks" / "matrix" / f"{file}.txt").read_text()
    assert f"\n{package}=={table()[framework][-1]}\n" in pins
