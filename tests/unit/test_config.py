# SPDX-License-Identifier: Apache-2.0
"""The settings table: sources and their order, bounds, secrets, children, docs."""

from __future__ import annotations

import dataclasses
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps import config
from fastps.config import SETTINGS, Config, Derived, child_environment, launchers, load
from fastps.config import __main__ as command
from fastps.config.token import drop_token, hide_token, hold_token
from fastps.errors import ConfigError

SECRET = "9f3a61c07be2d584-very-secret"


def test_table_and_config_have_the_same_fields():
    fields = [field.name for field in dataclasses.fields(Config)]
    table = [setting.field for setting in SETTINGS]
    assert sorted(fields) == sorted(table)
    assert len(set(table)) == len(table)


def test_no_name_means_two_settings():
    names = [setting.name for setting in SETTINGS]
    for setting in SETTINGS:
        names += [a if isinstance(a, str) else a.label for a in setting.aliases]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.field)
def test_row_is_whole(setting):
    assert setting.sentence.endswith(".")
    assert setting.sentence[0].isupper()
    if setting.default is not None:
        assert getattr(load({}, {}), setting.field) == setting.default
    name, _, value = setting.example.partition("=")
    loaded = load({}, {name: value, "FASTPS_SIZE": "100"} if name != "FASTPS_SIZE" else {})
    assert loaded is not None


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.field)
def test_default_is_within_bounds(setting):
    if setting.default is not None:
        assert config._parse(setting, setting.default, "default") == setting.default


def test_defaults_without_environment():
    loaded = load(environ={})
    assert (loaded.role, loaded.size, loaded.rank) == ("worker", 1, None)
    assert (loaded.partition_bytes, loaded.chunk_bytes) == (4096000, 0)
    assert (loaded.op_timeout_s, loaded.lease_s) == (300.0, 1.0)


def test_order_of_sources():
    environ = {"DMLC_PS_ROOT_URI": "c", "MASTER_ADDR": "d"}
    assert load({}, environ).scheduler_host == "c"
    environ["FASTPS_SCHEDULER_HOST"] = "b"
    assert load({}, environ).scheduler_host == "b"
    assert load({"scheduler_host": "a"}, environ).scheduler_host == "a"
    assert load({"scheduler_host": None}, environ).scheduler_host == "b"
    del environ["FASTPS_SCHEDULER_HOST"], environ["DMLC_PS_ROOT_URI"]
    assert load({}, environ).scheduler_host == "d"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.field)
def test_plain_aliases_are_read(setting):
    base = {"FASTPS_SIZE": "9"} if setting.field != "size" else {}
    for alias in setting.aliases:
        if isinstance(alias, Derived):
            continue
        _, _, example = setting.example.partition("=")
        loaded = load({}, base | {alias: example})
        direct = load({}, base | {setting.name: example})
        assert getattr(loaded, setting.field) == getattr(direct, setting.field)
        assert load({}, base | {alias: "  "}) == load({}, base)


def test_torchrun_names():
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    loaded = load({}, environ)
    assert (loaded.rank, loaded.size, loaded.local_rank, loaded.local_size) == (3, 4, 1, 2)


def test_byteps_counts_machines():
    environ = {
        "DMLC_ROLE": "worker",
        "DMLC_NUM_WORKER": "3",
        "DMLC_WORKER_ID": "2",
        "DMLC_NUM_SERVER": "4",
        "BYTEPS_LOCAL_SIZE": "8",
        "BYTEPS_LOCAL_RANK": "5",
        "DMLC_PS_ROOT_URI": "10.0.0.1",
        "DMLC_PS_ROOT_PORT": "1234",
    }
    loaded = load({}, environ)
    assert (loaded.size, loaded.rank, loaded.num_servers) == (24, 21, 4)
    assert (loaded.scheduler_host, loaded.scheduler_port) == ("10.0.0.1", 1234)
    one_each = {"DMLC_NUM_WORKER": "3", "DMLC_WORKER_ID": "2"}
    assert (load({}, one_each).size, load({}, one_each).rank) == (3, 2)
    assert load({}, environ | {"BYTEPS_GLOBAL_RANK": "7"}).rank == 7


def test_slurm_and_open_mpi_names():
    slurm = load({}, {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"})
    assert (slurm.rank, slurm.size, slurm.local_rank) == (2, 4, 0)
    prefix = "OMPI_COMM_WORLD_"
    names = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    mpi = load({}, {prefix + name: value for name, value in names.items()})
    assert (mpi.rank, mpi.size, mpi.local_rank, mpi.local_size) == (1, 2, 1, 2)


def test_byteps_credit_is_in_partitions():
    environ = {"BYTEPS_SCHEDULING_CREDIT": "4", "BYTEPS_PARTITION_BYTES": "1000001"}
    loaded = load({}, environ)
    assert (loaded.partition_bytes, loaded.credit_bytes) == (1000064, 4 * 1000064)
    assert load({}, {"BYTEPS_SCHEDULING_CREDIT": "0"}).credit_bytes == 0


@pytest.mark.parametrize("nbytes", [1 << 30, (1 << 30) + 1, (1 << 31) - 1, 1 << 31])
def test_what_byteps_takes_for_no_partitions_is_the_largest(nbytes):
    assert load({}, {"BYTEPS_PARTITION_BYTES": str(nbytes)}).partition_bytes == 1 << 30


def test_byteps_cpu_lists_have_a_part_for_each_local_rank():
    environ = {"BYTEPS_VISIBLE_CPU_CORES": "1,4-5:20-25", "LOCAL_RANK": "1"}
    assert load({}, environ).cpus == "20-25"
    assert load({}, {"BYTEPS_VISIBLE_CPU_CORES": "1,4-5"}).cpus == "1,4-5"
    with pytest.raises(ConfigError, match="local rank 2"):
        load({}, environ | {"LOCAL_RANK": "2"})


def test_derived_alias_that_is_no_number_is_named():
    with pytest.raises(ConfigError, match=r"DMLC_NUM_WORKER='two'"):
        load({}, {"DMLC_NUM_WORKER": "two"})


@given(st.integers(4096, 1 << 30))
def test_partition_bytes_are_rounded_up(nbytes):
    rounded = load({"partition_bytes": nbytes}, {}).partition_bytes
    assert rounded % 64 == 0
    assert 0 <= rounded - nbytes < 64


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FASTPS_PARTITION_BYTES", "4095999999"),
        ("FASTPS_PARTITION_BYTES", "64"),
        ("FASTPS_PARTITION_BYTES", "4MB"),
        ("FASTPS_ROLE", "joint"),
        ("DMLC_ROLE", "joint"),
        ("FASTPS_SIZE", "0"),
        ("FASTPS_SIZE", "1.5"),
        ("FASTPS_SCHEDULER_PORT", "65536"),
        ("FASTPS_OP_TIMEOUT_S", "inf"),
        ("FASTPS_OP_TIMEOUT_S", "nan"),
        ("FASTPS_OP_TIMEOUT_S", "0"),
        ("FASTPS_OP_TIMEOUT_S", "soon"),
        ("FASTPS_INSECURE", "maybe"),
        ("FASTPS_LOG_LEVEL", "LOUD"),
        ("FASTPS_KEY_HASH", "md5"),
        ("RANK", "-1"),
    ],
)
def test_bad_value_is_named_with_an_example(name, text):
    with pytest.raises(ConfigError) as caught:
        load({}, {name: text})
    message = str(caught.value)
    assert f"{name}={text!r}" in message
    assert "example: FASTPS_" in message


@pytest.mark.parametrize("bad", [True, 1.5, [], object(), b"4"])
def test_keyword_of_wrong_type_is_refused(bad):
    with pytest.raises(ConfigError, match="links_per_peer"):
        load({"links_per_peer": bad}, {})


@pytest.mark.parametrize("bad", [True, [], "", b"1", float("nan"), float("inf")])
def test_seconds_are_numbers(bad):
    with pytest.raises(ConfigError, match="seconds"):
        load({"op_timeout_s": bad}, {})
    assert load({"op_timeout_s": 2}, {}).op_timeout_s == 2.0


def test_bounds_are_told():
    with pytest.raises(
        ConfigError, match=r"1 to 16 connections; example: FASTPS_LINKS_PER_PEER=1"
    ):
        load({"links_per_peer": 17}, {})


def test_unknown_keyword_suggests_names():
    with pytest.raises(ConfigError, match="did you mean partition_bytes"):
        load({"partition_byte": 1}, {})
    with pytest.raises(ConfigError, match=r"unknown setting 'zzzzqqq'$"):
        load({"zzzzqqq": 1}, {})


def test_unknown_variable_warns_with_the_nearest(caplog):
    config._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="fastps.config"):
        load({}, {"FASTPS_PARTITON_BYTES": "1", "FASTPS_DEBUG": "1", "OTHER": "1"})
    assert len(caplog.records) == 1
    assert "FASTPS_PARTITON_BYTES" in caplog.text
    assert "did you mean FASTPS_PARTITION_BYTES" in caplog.text


def test_known_variables_do_not_warn(caplog):
    load({}, {setting.name: setting.example.partition("=")[2] for setting in SETTINGS})
    load({}, {"FASTPS_NUM_WORKERS": "2"})
    assert not caplog.records


@pytest.mark.parametrize("level", ["debug", "Debug", "TRACE"])
def test_log_level_in_any_case(level):
    assert load({}, {"BYTEPS_LOG_LEVEL": level}).log_level == "DEBUG"
    assert load({}, {"BYTEPS_LOG_LEVEL": "fatal"}).log_level == "CRITICAL"


def test_empty_text_is_a_value_and_empty_number_is_not():
    loaded = load({}, {"FASTPS_SAME_HOST_CONGESTION": "", "FASTPS_SIZE": "", "WORLD_SIZE": "2"})
    assert loaded.same_host_congestion == ""
    assert loaded.size == 2


def test_rank_must_be_below_size():
    with pytest.raises(ConfigError, match="FASTPS_RANK=2"):
        load({"rank": 2, "size": 2}, {})
    assert load({"rank": 2, "size": 2, "role": "server"}, {}).rank == 2


def test_lease_must_outlive_heartbeats():
    with pytest.raises(ConfigError, match="FASTPS_LEASE_S=1 must be at least twice"):
        load({"lease_s": 1, "heartbeat_s": 0.8}, {})


def test_heartbeats_are_not_too_frequent():
    with pytest.raises(ConfigError, match=r"FASTPS_HEARTBEAT_S=0\.01 must be 0 or at least 0.05"):
        load({"heartbeat_s": 0.01}, {})


# ---- secrets


def test_token_is_never_shown():
    loaded = load({"token": SECRET}, {})
    assert SECRET not in repr(loaded) + str(loaded) + f"{loaded!r:>2000}"
    assert loaded.token_bytes() == SECRET.encode()
    lines = config.explain({"token": SECRET}, {})
    assert SECRET not in str(lines)
    with pytest.raises(ConfigError) as caught:
        load({"token": [SECRET]}, {})
    assert SECRET not in str(caught.value)


def test_missing_token_says_what_to_set():
    with pytest.raises(ConfigError, match="FASTPS_TOKEN_FILE"):
        load({}, {}).token_bytes()


def test_insecure_allows_no_token_and_warns(caplog):
    assert load({"insecure": True}, {}).token_bytes() == b""
    assert "FASTPS_INSECURE" in caplog.text


def test_a_token_that_can_be_guessed_is_refused(tmp_path):
    path = tmp_path / "token"
    path.write_text("fifteen bytes !\n")
    path.chmod(0o600)
    for given_values in ({"token": "fifteen bytes !"}, {"token_file": path}):
        with pytest.raises(ConfigError, match=r"15 bytes.*at least 16") as caught:
            load(given_values, {}).token_bytes()
        assert "fifteen" not in str(caught.value)
    assert load({"token": "sixteen bytes :)\n"}, {}).token_bytes() == b"sixteen bytes :)"


@pytest.mark.parametrize("weak", [
    "x" * 32, "ab" * 20, "0123456789abcdef", "abcdefghijklmnopqrstuvwxyz", "password" * 4,
    "0000000000000001",
])  # fmt: skip
def test_a_token_that_only_is_long_is_refused_with_a_command_that_makes_one(weak):
    with pytest.raises(ConfigError, match=r"can be guessed.*secrets.token_hex") as caught:
        load({"token": weak}, {}).token_bytes()
    assert weak not in str(caught.value)


def test_tokens_that_are_random_are_taken():
    random = Random(1)
    for _ in range(1000):
        for token in (f"{random.getrandbits(64):016x}", str(random.randrange(10**15, 10**16))):
            assert load({"token": token}, {}).token_bytes() == token.encode()


@pytest.mark.parametrize("text", ["\udcff" * 32, "x" * 20 + "\ud800", "x" * 20 + "\0"])
def test_texts_that_are_none_are_refused(text):
    for name in ("token", "host", "job_id"):
        for given_values, environ in (({name: text}, {}), ({}, {f"FASTPS_{name.upper()}": text})):
            with pytest.raises(ConfigError, match="UTF-8 without zero bytes"):
                load(given_values, environ)


def test_paths_without_zero_bytes():
    with pytest.raises(ConfigError, match=r"token_file.*a path without zero bytes"):
        load({"token_file": "a\0b"}, {})


def test_the_token_leaves_the_environment_and_is_still_found(monkeypatch):
    for name in ("FASTPS_TOKEN", "FASTPS_TOKEN_FILE"):
        monkeypatch.setenv(name, "put back after the test")
    monkeypatch.setenv("FASTPS_TOKEN", SECRET)
    hide_token()
    for words in (["env"], [sys.executable, "-c", "import os; print(os.environ)"]):
        assert SECRET not in subprocess.run(words, capture_output=True, text=True).stdout
    assert load().token_bytes() == SECRET.encode()
    hide_token()
    assert load().token_bytes() == SECRET.encode()
    code = "from fastps import config; print(config.load().token_bytes().decode())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.stdout.strip() == SECRET, "a process that is to join can"
    drop_token(os.environ["FASTPS_TOKEN_FILE"])


def test_the_token_is_overwritten_where_the_kernel_shows_it():
    code = (
        "import pathlib; from fastps.config.token import hide_token; hide_token(); "
        "print(pathlib.Path('/proc/self/environ').read_text())"
    )
    given = os.environ | {"FASTPS_TOKEN": SECRET}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=given)
    assert f"FASTPS_TOKEN={'0' * len(SECRET)}\0" in shown.stdout
    assert SECRET not in shown.stdout


def test_a_forked_child_has_no_descriptor_of_a_token():
    files = [hold_token(SECRET)[1] for _ in range(2)]
    drop_token(files[0])
    drop_token(files[0])
    number = files[1].rpartition("/")[2]
    child = os.fork()
    if not child:
        os._exit(os.path.exists(f"/proc/self/fd/{number}"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert Path(files[1]).read_text() == SECRET
    drop_token(files[1])
    assert not os.path.exists(files[1])


def test_each_config_has_a_text_of_its_own():
    assert load({"token": SECRET}, {}).token is not load({"token": SECRET}, {}).token


def test_the_token_stays_where_the_kernel_has_no_memory_for_it(monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setenv("FASTPS_TOKEN", SECRET)
    hide_token()
    assert load().token_bytes() == SECRET.encode()


def test_token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    loaded = load({"token_file": path}, {})
    assert loaded.token_bytes() == SECRET.encode()
    path.chmod(0o400)
    assert loaded.token_bytes() == SECRET.encode()
    assert load({"token_file": path, "token": "other-0123456789"}, {}).token_bytes() != SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o622, 0o601])
def test_token_file_that_others_may_use_is_refused(tmp_path, mode):
    path = tmp_path / "token"
    path.write_text(SECRET)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600"):
        load({"token_file": path}, {}).token_bytes()


def test_token_file_of_somebody_else_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text(SECRET)
    path.chmod(0o600)
    owned = os.stat_result((stat.S_IFREG | 0o600, 0, 0, 1, os.geteuid() + 1, 0, 9, 0, 0, 0))
    monkeypatch.setattr(os, "fstat", lambda descriptor: owned)
    with pytest.raises(ConfigError, match="belongs to user"):
        load({"token_file": path}, {}).token_bytes()


@pytest.mark.parametrize("content", [b"", b" \n", b"x" * 5000, b"\xff" * 32])
def test_token_file_of_odd_size_is_refused(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="must hold 16 to 4096 bytes of UTF-8"):
        load({"token_file": path}, {}).token_bytes()


def test_missing_token_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load({"token_file": tmp_path / "none"}, {}).token_bytes()


# ---- children and the machine


def overrides() -> st.SearchStrategy[dict[str, object]]:
    numbers = {
        "size": st.integers(10, 99),
        "rank": st.integers(0, 9),
        "num_servers": st.integers(0, 99),
        "partition_bytes": st.integers(4096, 1 << 30),
        "op_timeout_s": st.floats(0.1, 1000.0),
        "heartbeat_s": st.floats(0.05, 0.5),
    }
    others = {
        "role": st.sampled_from(config.ROLES),
        "insecure": st.booleans(),
        "token": st.text(st.characters(codec="ascii", exclude_characters="\0")),
        "same_host_congestion": st.sampled_from(["", "reno", "cubic,reno"]),
        "log_level": st.sampled_from(config.LOG_LEVELS),
    }
    return st.fixed_dictionaries({"size": numbers.pop("size")}, optional=numbers | others)


@given(overrides())
def test_a_child_reads_back_what_its_parent_set(given_values):
    loaded = load(given_values, {})
    assert load({}, child_environment(given_values)) == loaded
    assert load({}, child_environment(loaded)) == loaded


def test_child_environment_checks_and_leaves_out_none():
    assert child_environment({"size": 2, "rank": None, "insecure": True, "lease_s": 2.5}) == {
        "FASTPS_SIZE": "2",
        "FASTPS_INSECURE": "1",
        "FASTPS_LEASE_S": "2.5",
    }
    with pytest.raises(ConfigError):
        child_environment({"size": 0})
    with pytest.raises(ConfigError):
        child_environment({"sizes": 1})


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert config.cache_dir() == tmp_path / "fastps"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.cache_dir() == tmp_path / ".cache" / "fastps"
    monkeypatch.setattr(Path, "home", staticmethod(_no_home))
    assert config.cache_dir().name == f"fastps-{os.geteuid()}"


def _no_home() -> Path:
    raise RuntimeError("no home")


def test_process_environment_is_a_copy(monkeypatch):
    monkeypatch.setenv("FASTPS_JOB_ID", "here")
    copy = config.process_environment()
    copy["FASTPS_JOB_ID"] = "there"
    assert load().job_id == "here"


# ---- command line


def test_explain_names_sources(capsys, monkeypatch, caplog):
    monkeypatch.setenv("FASTPS_SIZ", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("FASTPS_TOKEN", SECRET)
    assert command.main(["--explain"]) == 0
    out = capsys.readouterr().out
    assert "FASTPS_SIZE=3  # WORLD_SIZE\n" in out
    assert "FASTPS_TOKEN=(hidden)  # FASTPS_TOKEN\n" in out
    assert "FASTPS_RANK=  # default\n" in out
    assert SECRET not in out
    assert "did you mean FASTPS_SIZE" in caplog.text


def test_explain_reports_an_error(capsys, monkeypatch):
    monkeypatch.setenv("FASTPS_SIZE", "many")
    assert command.main(["--explain"]) == 2
    assert "FASTPS_SIZE='many'" in capsys.readouterr().err


def test_markdown_has_every_name(capsys):
    assert command.main(["--markdown"]) == 0
    out = capsys.readouterr().out
    for setting in SETTINGS:
        assert f"`{setting.name}`" in out
        assert setting.sentence in out


def test_module_runs():
    result = subprocess.run(
        [sys.executable, "-m", "fastps.config", "--markdown"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout == command.markdown()
    assert not result.stderr


def test_variables_of_bluefog_are_understood_or_answered(caplog):
    found = load(environ={"BLUEFOG_LOG_LEVEL": "trace", "BLUEFOG_START_TIMEOUT": "33",
                          "BLUEFOG_TIMELINE": "/tmp/a", "BLUEFOG_CYCLE_TIME": "1"})  # fmt: skip
    assert (found.log_level, found.start_timeout_s) == ("DEBUG", 33.0)
    assert (found.trace_on, found.trace_start_step, found.trace_end_step) == (True, 1, 0)
    assert found.trace_dir == "/tmp/a"
    assert "without cycles" in caplog.text


def test_so_many_workers_are_a_machine_to_bluefog():
    environ = {"BLUEFOG_NODES_PER_MACHINE": "2", "FASTPS_SIZE": "4", "FASTPS_RANK": "3",
               "FASTPS_LOCAL_RANK": "3", "FASTPS_LOCAL_SIZE": "4"}  # fmt: skip
    found = load(environ=environ)
    assert (found.machine, found.local_rank, found.local_size) == ("machine 1", None, None)
    found = load(environ=environ | {"FASTPS_MACHINE": "mine"})
    assert (found.machine, found.local_rank, found.local_size) == ("mine", 3, 4)
    with pytest.raises(ConfigError, match="BLUEFOG_NODES_PER_MACHINE='0' is not"):
        load(environ=environ | {"BLUEFOG_NODES_PER_MACHINE": "0"})


def test_reweighting_needs_servers_that_do_not_die_with_a_worker():
    with pytest.raises(ConfigError, match="FASTPS_ON_LOSS"):
        load({"on_loss": "reweight", "colocate": "on"}, environ={})
    assert load({"on_loss": "reweight", "num_servers": 1}, environ={}).goes_on


TORCHRUN = {"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "2", "MASTER_ADDR": "h"}
BY_HAND = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_STEP_ID": "3", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "1"}


@pytest.mark.parametrize(
    ("environ", "sizes", "expected"),
    [
        ({}, (2, 2), None),
        (TORCHRUN | SRUN, (4, 2), ("torchrun", "r/2/h/", False, "h", "", False)),
        (TORCHRUN, (4, 4), ("torchrun", "r/2/h/", True, "h", "", False)),
        (SRUN, (4, 2), ("srun", "7.3", True, "", "", False)),
        (SRUN | {"SLURM_STEP_NUM_NODES": "2", "PMIX_RANK": "0", "SLURM_SUBMIT_DIR": "/d",
                 "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"},
         (4, 2), ("srun", "7.3", False, "10.0.0.9", "/d", True)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "n", "PMIX_RANK": "1",
          "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.5,10.1.0.5:4000"},
         (4, 2), ("mpirun", "n", False, "10.0.0.5", "", True)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_ess_base_jobid": "9"},
         (4, 4), ("mpirun", "9", True, "", "", False)),
        ({"DMLC_NUM_WORKER": " 1", "DMLC_PS_ROOT_PORT": "5"},
         (4, 2), ("BytePS", f"5/{os.getppid()}", True, "", "", False)),
        ({"DMLC_NUM_WORKER": "2"}, (4, 4), ("BytePS", f"/{os.getppid()}", False, "", "", False)),
        (BY_HAND, (4, 2), ("MASTER_ADDR", "10.0.0.1/29500", False, "10.0.0.1", "", False)),
        (BY_HAND, (4, 4), ("MASTER_ADDR", "10.0.0.1/29500", True, "10.0.0.1", "", False)),
        (BY_HAND | {"MASTER_ADDR": "::1"}, (4, 2),
         ("MASTER_ADDR", "::1/29500", True, "::1", "", False)),
    ],
)  # fmt: skip
def test_other_launchers_are_known_by_their_variables(environ, sizes, expected):
    size, local_size = sizes
    settings = {"rank": 0, "size": size, "local_rank": 0, "local_size": local_size}
    assert launchers.find(load(settings, {}), environ) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"size": 2}, True),
        ({"size": 1}, False),
        ({"size": 2, "num_servers": 1}, False),
        ({"size": 2, "num_validators": 1}, False),
        ({"size": 2, "scheduler_port": 5}, False),
        ({"size": 2, "role": "server"}, False),
    ],
)
def test_only_workers_without_a_scheduler_are_left_alone(settings, expected):
    assert launchers.is_left_alone(load(settings, {})) == expected
