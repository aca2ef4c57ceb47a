# SPDX-License-Identifier: Apache-2.0
"""Which device, address and data path are chosen, from made-up tables of devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.config import Config, load
from fastps.errors import ConfigError
from fastps.transport import rdma
from fastps.transport.rdma import ACK_UNIT_S, Capability

IPV4 = "0000:0000:0000:0000:0000:ffff:0a09:0001"
OTHER_IPV4 = "0000:0000:0000:0000:0000:ffff:0a09:0002"
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"
LINK_LOCAL = "fe80:0000:0000:0000:c4be:c4ff:fee8:859a"
UNSET = "0000:0000:0000:0000:0000:0000:0000:0000"
V1, V2, IB = "IB/RoCE v1", "RoCE v2", "IB/RoCE v1"


def make_port(
    devices: Path,
    name: str,
    port: int,
    gids: list[tuple[str, str]],
    *,
    state: str = "4: ACTIVE",
    layer: str = "Ethernet",
    kind: str = "1: CA",
) -> None:
    """Write what the kernel says of one port."""
    folder = devices / name / "ports" / str(port)
    (folder / "gids").mkdir(parents=True)
    (folder / "gid_attrs" / "types").mkdir(parents=True)
    (devices / name / "node_type").write_text(kind + "\n", encoding="utf-8")
    (folder / "link_layer").write_text(layer + "\n", encoding="utf-8")
    (folder / "state").write_text(state + "\n", encoding="utf-8")
    for index, (gid, kind) in enumerate(gids):
        (folder / "gids" / str(index)).write_text(gid + "\n", encoding="utf-8")
        (folder / "gid_attrs" / "types" / str(index)).write_text(kind + "\n", encoding="utf-8")


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """A table of devices, empty."""
    folder = tmp_path / "infiniband"
    folder.mkdir()
    return folder


def settings(**options: object) -> Config:
    """Load settings of RDMA that no environment disturbs."""
    return load({f"rdma_{name}": value for name, value in options.items()}, {})


def chosen(devices: Path, **options: object) -> tuple[str, int, int, str]:
    """Probe and give what was chosen."""
    found = rdma.probe(settings(**options), devices=devices)
    return found.device, found.port, found.gid_index, found.gid


def test_no_device(tmp_path, devices):
    for folder in (devices, tmp_path / "nothing"):
        found = rdma.probe(devices=folder)
        assert not found.is_usable
        assert "no RDMA device" in found.reason
        assert found.describe().startswith("no RDMA: ")


@pytest.mark.parametrize(
    ("gids", "best"),
    [
        ([(LINK_LOCAL, V2), (IPV4, V2), (OTHER_IPV4, V2)], 1),
        ([(IPV4, V1), (IPV4, V2)], 1),
        ([(LINK_LOCAL, V2), (IPV6, V2)], 1),
        ([(UNSET, V2), (LINK_LOCAL, V2)], 1),
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2)], 1),
        ([(IPV4, V1), (UNSET, "")], 0),
    ],
)
def test_the_most_routable_address_is_chosen(devices, gids, best):
    make_port(devices, "rxe0", 1, gids)
    assert chosen(devices) == ("rxe0", 1, best, gids[best][0])


def test_the_address_of_infiniband_is_no_roce_v1(devices):
    make_port(devices, "mlx5_0", 1, [(LINK_LOCAL, IB), (UNSET, "")], layer="InfiniBand")
    make_port(devices, "mlx5_1", 1, [(LINK_LOCAL, V2), (LINK_LOCAL, V1)])
    assert chosen(devices) == ("mlx5_0", 1, 0, LINK_LOCAL)
    assert chosen(devices, device="mlx5_1") == ("mlx5_1", 1, 0, LINK_LOCAL)


def test_devices_that_cannot_write_with_a_number_are_passed_over(devices):
    make_port(devices, "efa_0", 1, [(IPV6, IB)], kind="7: unspecified")
    make_port(devices, "irdma0", 1, [(IPV4, IB)], kind="4: RNIC")
    reason = rdma.probe(devices=devices).reason
    assert "efa_0 is 7: unspecified: neither InfiniBand nor RoCE" in reason
    make_port(devices, "mlx5_0", 1, [(IPV4, V2)])
    assert chosen(devices) == ("mlx5_0", 1, 0, IPV4)


def test_the_first_active_port_is_chosen(devices):
    make_port(devices, "mlx5_0", 1, [(IPV4, V2)], state="1: DOWN")
    make_port(devices, "mlx5_1", 1, [(IPV4, V2)], state="1: DOWN")
    make_port(devices, "mlx5_1", 2, [(OTHER_IPV4, V2)])
    assert chosen(devices) == ("mlx5_1", 2, 0, OTHER_IPV4)
    assert (
        "port 1 of mlx5_0 is 1: DOWN"
        in rdma.probe(settings(device="mlx5_0"), devices=devices).reason
    )
    assert "not there" in rdma.probe(settings(port=3), devices=devices).reason


def test_what_is_asked_for_is_taken_or_named(devices):
    make_port(devices, "a", 1, [(IPV4, V2), (IPV6, V2), (UNSET, "")])
    make_port(devices, "b", 1, [(OTHER_IPV4, V2)])
    assert chosen(devices, device="b") == ("b", 1, 0, OTHER_IPV4)
    assert chosen(devices, gid_index=1) == ("a", 1, 1, IPV6)
    assert "there are a, b" in rdma.probe(settings(device="c"), devices=devices).reason
    for index in (2, 9):
        reason = rdma.probe(settings(device="a", gid_index=index), devices=devices).reason
        assert "no usable address" in reason


def test_a_data_path_that_is_not_there_is_named_with_its_cure(devices, monkeypatch):
    make_port(devices, "a", 1, [(IPV4, V2)])
    monkeypatch.setattr(rdma.importlib.util, "find_spec", lambda name: None)
    found = rdma.probe(devices=devices)
    assert not found.is_usable
    assert "apt-get install" in found.reason
    monkeypatch.setattr(
        rdma.importlib.util, "find_spec", lambda name: object() if name == "pyverbs" else None
    )
    assert rdma.probe(devices=devices).data_path == "pyverbs"
    assert not rdma.probe(settings(data_path="native"), devices=devices).is_usable


def test_opening_without_a_device_is_an_error_that_says_why(monkeypatch, devices):
    monkeypatch.setattr(rdma, "probe", lambda config: Capability(reason="nothing there"))
    with pytest.raises(ConfigError, match="nothing there"):
        rdma.open_device()


# ---- one link ----

HERE = Capability(device="a", port=1, gid=IPV4, data_path="native")
NOWHERE = Capability(reason="the kernel knows no RDMA device")


def test_who_uses_rdma():
    assert rdma.wants_rdma("tcp", HERE, IPV4)[0] is False
    for transport in ("rdma", "auto"):
        wanted, why = rdma.wants_rdma(transport, HERE, IPV4)
        assert wanted
        assert "native" in why
    for mine, theirs, part in ((NOWHERE, IPV4, "the kernel"), (HERE, "", "the peer has no")):
        wanted, why = rdma.wants_rdma("auto", mine, theirs)
        assert not wanted
        assert part in why
        with pytest.raises(ConfigError, match=part):
            rdma.wants_rdma("rdma", mine, theirs)


@given(st.floats(0.01, 60.0), st.integers(0, 6))
def test_all_tries_together_take_about_the_time_out(timeout_s, retries):
    exponent = rdma.ack_timeout_of(timeout_s, retries)
    assert 1 <= exponent <= 31
    whole = ACK_UNIT_S * 2**exponent * (retries + 1)
    assert timeout_s / 1.5 <= whole <= timeout_s * 1.5


def test_the_default_time_out_notices_a_lost_peer_within_ten_seconds():
    assert rdma.ack_timeout_of(settings().rdma_timeout_s, settings().rdma_retries) == 18


# ---- the distribution's pyverbs ----


def test_linking_pyverbs(tmp_path):
    installed, site = tmp_path / "pyverbs-of-debian", tmp_path / "site"
    site.mkdir()
    with pytest.raises(ConfigError, match="apt-get install python3-pyverbs"):
        rdma.link_pyverbs(site, installed=installed)
    installed.mkdir()
    (installed / "qp.cpython-27-x86_64-linux-gnu.so").touch()
    with pytest.raises(ConfigError, match="was not built for"):
        rdma.link_pyverbs(site, installed=installed)
    tag = "cpython-{}{}".format(*rdma.sys.version_info[:2])
    (installed / f"qp.{tag}-x86_64-linux-gnu.so").touch()
    for _ in range(2):
        link = rdma.link_pyverbs(site, installed=installed)
        assert link.resolve() == installed
    link.unlink()
    link.mkdir()
    with pytest.raises(ConfigError, match="is not a symbolic link"):
        rdma.link_pyverbs(site, installed=installed)
