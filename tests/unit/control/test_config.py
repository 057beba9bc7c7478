"""The configuration: precedence, errors that tell the place, and documentation from the fields."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.control import configdoc
from slurm_ext.control.config import Act, Config, load_config
from slurm_ext.domain.errors import ConfigError

ROOT = Path(__file__).parents[3]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_defaults_only_observe():
    config = load_config(Path("/dev/null"), environ={})
    assert config == Config()
    assert not config.acting
    assert not any(config.may("main", act) for act in Act)


def test_switches_may_be_switched():
    assert load_config(Path("/dev/null"), {}, ["read_comments=yes"]).read_comments


def test_later_sources_win_and_mappings_are_merged(tmp_path):
    main = write(
        tmp_path / "config.yaml",
        "cycle_s: 4\nlease_s: 200\npartitions: {main: {act: [order]}, low: {act: order}}\n",
    )
    write(tmp_path / "conf.d/10-a.yaml", "cycle_s: 3\ngpu_memory_gb: {v100: 16}\n")
    write(
        tmp_path / "conf.d/20-b.yaml",
        "partitions: {main: {act: [order, lease]}}\ngpu_memory_gb: {a100: 40}\n",
    )
    config = load_config(
        main,
        environ={"SLURM_EXT_LEASE_S": "100", "SLURM_EXT_HEAD": "7"},
        overrides=["head=9", "partitions.high.act=[order]"],
    )
    assert (config.cycle_s, config.lease_s, config.head) == (3, 100, 9)
    assert config.gpu_memory_gb == {"v100": 16, "a100": 40}
    assert config.may("main", Act.LEASE)
    assert config.may("low", Act.ORDER)
    assert not config.may("low", Act.LEASE)
    assert config.may("high", Act.ORDER)
    assert not config.may("elsewhere", Act.ORDER)
    assert not config.observing().acting


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cycle: 3\n", ["config.yaml", "cycle", "did you mean cycle_s?"]),
        ("partitions: {main: {acts: [order]}}\n", ["main.acts", "did you mean act?"]),
        ("cycle_s: 0.1\n", ["config.yaml: cycle_s=0.1", "0.2"]),
        ("cycle_s: .nan\n", ["cycle_s", "finite"]),
        ("cycle_s: true\n", ["config.yaml: cycle_s=True", "not numbers"]),
        ("head: yes\n", ["head=True", "not numbers"]),
        ("gpu_memory_gb: {v100: on}\n", ["gpu_memory_gb.v100=True", "not numbers"]),
        ("policy: best\n", ["policy='best'", "titan", "srtf"]),
        ("lease_s: 8\n", ["two cycles", "raise lease_s"]),
        ("partitions: {main: {act: [resize]}}\n", ["only safe under a lease"]),
        ("partitions: {main: {act: [fly]}}\n", ["partitions.main.act", "order"]),
        ("metrics_listen: localhost\n", ["ADDRESS:PORT"]),
        ("cycle_s: 3\ncycle_s: 4\n", ["config.yaml:2", "written twice"]),
        ("cycle_s: [\n", ["config.yaml:2"]),
        ("- a\n", ["not a list of KEY: VALUE"]),
        ("? [a]\n: 2\n", ["config.yaml:1", "a key is a list"]),
        ("[" * 5000, ["config.yaml", "nested too deeply"]),
        ("journal: ~/journal.sqlite\n", ["journal", "begins with /"]),
        ("spool: here\n", ["spool", "begins with /"]),
        ("heartbeat: /\n", ["heartbeat", "begins with /"]),
        ('table: "/a\\0b"\n', ["table", "whole path"]),
    ],
)
def test_an_error_names_file_key_and_fix(tmp_path, text, words):
    main = write(tmp_path / "config.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(main, environ={})
    for word in words:
        assert word in str(caught.value)


def test_an_error_names_the_source_that_holds_it(tmp_path):
    main = write(tmp_path / "config.yaml", "head: 5\n")
    part = write(tmp_path / "conf.d/x.yaml", "head: many\n")
    with pytest.raises(ConfigError, match=str(part)):
        load_config(main, environ={})
    part.unlink()
    with pytest.raises(ConfigError, match="SLURM_EXT_HEAD"):
        load_config(main, environ={"SLURM_EXT_HEAD": "-1"})
    with pytest.raises(ConfigError, match="--set head=x"):
        load_config(main, environ={}, overrides=["head=x"])
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        load_config(main, environ={}, overrides=["head"])


def test_a_named_file_must_exist(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "absent.yaml", environ={})
    with pytest.raises(ConfigError, match="no such file"):
        load_config(environ={"SLURM_EXT_CONFIG": str(tmp_path / "absent.yaml")})


@given(st.text(min_size=1, max_size=20).filter(lambda s: s not in Config.model_fields))
def test_no_unknown_key_passes(key):
    with pytest.raises(ConfigError):
        load_config(Path("/dev/null"), environ={}, overrides=[f"{key}=1"])


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ("markdown", "docs/config.md"),
        ("man", "site/man/slurm-ext-config.5"),
        ("example", "site/config.yaml.example"),
    ],
)
def test_committed_documentation_is_printed_from_the_fields(form, path):
    printed = subprocess.run(
        [sys.executable, "-m", "slurm_ext.control.config", "--emit", form],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stdout
    assert (ROOT / path).read_text() == printed


def test_every_key_is_documented_and_the_example_holds_the_defaults():
    for key in configdoc.documented():
        assert len(key.text) > 20, key.name
    uncommented = "\n".join(
        line[1:]
        for line in configdoc.example().splitlines()
        if line.startswith("#")
        and line[1:2] not in (" ", "")
        and ":" in line
        # the worked example of partitions follows its default
        and not line.endswith("partitions:")
    )
    assert (
        load_config(Path("/dev/null"), environ={}).model_dump()
        == Config.model_validate(yaml.safe_load(uncommented)).model_dump()
    )


def test_every_key_is_read_somewhere():
    """A key that nothing reads is a bug: it is looked for as an attribute of a configuration."""
    source = "\n".join(
        path.read_text()
        for path in (ROOT / "slurm_ext").rglob("*.py")
        if path.name not in ("config.py", "configdoc.py")
    )
    unread = [
        name
        for name in Config.model_fields
        if re.search(rf"\b_?config(\([^()]*\))?\.{name}\b", source) is None
    ]
    assert unread == []
