# SPDX-License-Identifier: Apache-2.0
"""A path that carries small packets alone, and does not say so: its error names the MTU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, clean_environ

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools import netlab
from tools.netlab import NetLab

# Alone: whoever is late hears that the other has given up, in place of the cause.
pytestmark = [pytest.mark.root, pytest.mark.alone, pytest.mark.timeout(110)]

NARROW = 900  # bytes: more than control messages need, less than a full segment
# Small operations until the path is narrow, then one that fills packets.
PROGRAM = """
import pathlib, sys, time
import numpy as np
import fastps
fastps.init()
narrow = pathlib.Path(__file__).with_name("narrow")
print("up", flush=True)
while not fastps.broadcast_object(narrow.exists()):
    time.sleep(0.05)
try:
    fastps.push_pull(np.ones(100_000, np.float32), "x")
except fastps.FastPSError as error:
    sys.exit(f"{type(error).__name__} {error}")
"""


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"FASTPS_TCP_USER_TIMEOUT_S": "14"}, "PeerLostError"),
        ({"FASTPS_OP_TIMEOUT_S": "14"}, "StallError"),
    ],
)
def test_after_10_s_without_acknowledgement_the_mtu_is_a_suspect(tmp_path, settings, kind):
    if lack := netlab.missing():
        pytest.skip(f"no make-believe hosts here: {lack}")
    program, token = tmp_path / "train.py", tmp_path / "job.token"
    program.write_text(PROGRAM)
    token.touch(0o600)
    token.write_text("9f3a61c07be2d584" * 2)
    environ = clean_environ() | {"PYTHONPATH": str(ROOT)} | settings
    with NetLab(hosts=2, rate="1gbit", cc="cubic") as lab:
        words = ["--machines", "2", "--scheduler-host", lab.address(0), "--scheduler-port",
                 "29555", "--token-file", str(token)]  # fmt: skip
        launch = [sys.executable, "-m", "fastps.launch.run", *words]
        machines = [
            lab.popen(
                host, [*launch, "--machine-rank", str(host), sys.executable, str(program)],
                env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for host in range(2)
        ]  # fmt: skip
        for machine in machines:
            assert "up" in machine.stdout.readline()
        make_narrow(lab)
        (tmp_path / "narrow").touch()
        errors = "".join(machine.communicate(timeout=80)[1] for machine in machines)
    assert kind in errors
    assert "(MTU); check it by `ping -M do -s 1472`" in errors
    assert "left the job" not in errors


def make_narrow(lab: NetLab) -> None:
    """Drop what is longer than a bucket on both ways, without a word, as a bridge does."""
    for port in ("port0", "port1"):
        words = f"tc -n {lab.name}-switch qdisc replace dev {port} root tbf rate 1gbit"
        bucket = [*words.split(), "burst", str(NARROW), "limit", "1000000"]
        subprocess.run(bucket, capture_output=True, check=True)
