# SPDX-License-Identifier: Apache-2.0
"""What the documents tell a reader to do works: every command and every program is run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from house_source import ROOT

sys.path.insert(0, str(ROOT / "tests" / "cluster"))

from fork_server import FORKING_PYTHON, forking

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LIMIT_S = 280  # four processes that import PyTorch on a busy machine with two cores
# Commands that are too long for here, and the test that runs what they do.
COVERED = {
    "make test-frameworks": "tests/frameworks/test_jax.py",
    "make demo": "tests/cluster/test_demo.py",
    "make test": "tests/house/test_docs.py",
    "pip install .": "tests/house/test_packaging.py",
    "fastps-run --join 10.0.0.1:7654 --token-file job.token -np 2 python train.py": (
        "tests/faults/test_join_launched.py"
    ),
    "fastps-run --host-discovery-script ./hosts.sh --min 2 --max 16 python train.py": (
        "tests/faults/test_join_launched.py"
    ),
}
# Programs of these pages run where their framework is.
FRAMEWORKS = {
    "jax.md": "jax",
    "tensorflow.md": "tensorflow",
    "keras.md": "keras",
    "mxnet.md": "mxnet",
    "ray.md": "ray",
}
# One framework is old, and uses what is; the other warns of its own plans.
WARN = {"mxnet.md": ["-W", "ignore::DeprecationWarning"], "ray.md": ["-W", "ignore"]}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def blocks(language: str) -> list[tuple[str, str]]:
    """List (document, text) of all fenced blocks of a language."""
    return [
        (document.name, text)
        for document in DOCUMENTS
        for found, text in FENCE.findall(document.read_text())
        if found == language
    ]


def commands() -> list[str]:
    """List every line of every shell block, once."""
    lines = [line for _, text in blocks("sh") for line in text.splitlines() if line.strip()]
    return list(dict.fromkeys(lines))


def environment() -> dict[str, str]:
    """Put this interpreter's commands first, as an activated environment does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FASTPS_")}
    # Ray would start as many processes as it has CPUs, before anybody wants one.
    kept["RAY_enable_worker_prestart"] = "0"
    return forking(kept)


def run(command: list[str], folder: Path) -> str:
    """Run a command to its end and give its output; fail with it otherwise."""
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}"
    return result.stdout


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("command", [line for line in commands() if line not in COVERED])
def test_documented_command_works(command):
    assert run(["bash", "-c", command], ROOT)


def test_long_commands_are_documented_and_covered():
    assert set(COVERED) <= set(commands()), "a command left the documents; remove it from COVERED"
    for test in COVERED.values():
        assert (ROOT / test).is_file()


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize(("document", "program"), blocks("python"))
def test_documented_program_works(document, program, tmp_path):
    if document in FRAMEWORKS and importlib.util.find_spec(FRAMEWORKS[document]) is None:
        pytest.skip(f"{FRAMEWORKS[document]} is not here: make test-frameworks")
    strict = ["-W", "error", *(WARN.get(document, ()))]
    run([str(FORKING_PYTHON), *strict, "-c", program], tmp_path)


def test_the_readmes_program_is_the_example():
    program = (ROOT / "examples" / "minimal.py").read_text().partition('"""\n\n')[2]
    assert program in [text for name, text in blocks("python") if name == "README.md"]


def test_blocks_say_what_they_are():
    for document in DOCUMENTS:
        languages = {language for language, _ in FENCE.findall(document.read_text())}
        # text: what takes several machines, or minutes
        assert languages <= {"sh", "python", "text"}, f"{document.name} has {languages}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document):
    for target in LINK.findall(document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_errors_that_are_explained_exist():
    code = "".join(path.read_text() for path in (ROOT / "fastps").rglob("*.py"))
    said = re.sub(r'"\s*\n\s*f?"', "", code)  # a text of several lines is one
    told = re.findall(r"^\*\*`(.*)`\*\*$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    assert len(told) > 15
    for text in told:
        for part in text.split("…"):
            assert part in said, f"no error says {part!r}"


def test_the_site_has_every_page():
    site = (ROOT / "mkdocs.yml").read_text()
    for document in DOCUMENTS[1:]:
        assert document.name in site, f"mkdocs.yml does not name {document.name}"


def test_the_site_can_be_built(tmp_path):
    generator = ROOT / ".venvs" / "docs" / "bin" / "mkdocs"
    if not generator.exists():
        pytest.skip("no generator: make docs")
    run([str(generator), "build", "--strict", "--quiet", "--site-dir", str(tmp_path)], ROOT)
    assert "push_pull" in (tmp_path / "api" / "index.html").read_text()


def test_the_map_names_what_exists():
    """Of each room in docs/architecture.md, the files to read first."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = [row.split("|") for row in page.splitlines() if re.match(r"\| \d+ \|", row)]
    assert len(rows) > 20
    for _, _, room, _, files, _ in rows:
        folder = ROOT / "fastps" / room.split("`")[1]
        for name in re.findall(r"`([^`]+)`", files):
            found = [*folder.parent.glob(f"{name}*")] if folder.is_file() else []
            found += [*folder.glob(f"{name}*"), *(ROOT / "fastps").glob(f"{name}*")]
            assert found, f"{room}: {name}"
