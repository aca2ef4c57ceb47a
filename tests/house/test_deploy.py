# SPDX-License-Identifier: Apache-2.0
"""The manifests are what their schemas allow, and the commands in them what fastps-run takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from house_source import ROOT

yaml = pytest.importorskip("yaml")

MANIFESTS = sorted((ROOT / "deploy").glob("*.yaml"))


def documents(path: Any) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pods(node: Any) -> Iterator[dict[str, Any]]:
    """Give every specification of a pod below a node."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for value in node.values():
            yield from pods(value)
    elif isinstance(node, list):
        for value in node:
            yield from pods(value)


def model(document: dict[str, Any]) -> Any:
    """Give the model of a kind that is no part of Kubernetes itself."""
    kinds = pytest.importorskip("kubeflow_trainer_api.models")
    prefix = {"JobSet": "JobsetV1alpha2", "ClusterTrainingRuntime": "TrainerV1alpha1"}
    kind = document["kind"]
    return getattr(kinds, prefix[kind] + kind)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_is_valid(path):
    kubernetes = pytest.importorskip("kubernetes_validate")
    for document in documents(path):
        if document["apiVersion"] in ("v1", "batch/v1"):
            kubernetes.validate(document, kubernetes.latest_version(), strict=True)
            continue
        read = model(document).from_dict(document)
        assert read.to_dict() == document, "the schema does not know a part of it"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_pod_starts_a_machine_of_the_job_as_an_ordinary_user(path):
    found = list(pods(documents(path)))
    assert found
    for pod in found:
        (container,) = pod["containers"]
        given = {"JOB_COMPLETION_INDEX": "0", "JOBSET": "train"} | {
            row["name"]: row["value"] for row in container["env"] if "value" in row
        }
        words = [*container["command"], *container["args"]]
        for name, value in given.items():
            words = [word.replace(f"$({name})", value) for word in words]
        assert "$(" not in str(words)
        dry = [sys.executable, "-m", "fastps.launch.run", "--dry-run", *words[1:]]
        environ = os.environ | {"FASTPS_TOKEN": "9f3a61c07be2d5840123", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            dry, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert container["securityContext"]["runAsNonRoot"]


def test_what_the_image_copies_is_there():
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1] for line in lines if line.startswith("COPY")]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
