"""What an administrator copies: it has to agree with the code, and with itself."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

import pytest
import yaml

from slurm_ext.cli.check import DEFAULT_GRACE_S, Level, grace, slurm_questions
from slurm_ext.cli.main import build_parser
from slurm_ext.control.config import DEFAULT_PATH, Config
from slurm_ext.slurm.facts import SlurmConfig
from tests.unit.site.prose import SITE

UNITS = sorted([*SITE.glob("*.service"), *SITE.glob("*.timer")])
RESIZING = Config(partitions={"main": {"act": ["order", "lease", "resize"]}})


def unit(path: Path) -> configparser.RawConfigParser:
    parsed = configparser.RawConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read_string(path.read_text())
    return parsed


def test_every_key_of_the_example_configuration_exists_with_its_default():
    lines = (SITE / "config.yaml.example").read_text().splitlines()
    keys = "\n".join(line[1:] for line in lines if re.match(r"#[a-z_]+: ", line))
    given = yaml.safe_load(keys)
    assert set(given) == set(Config.model_fields)
    assert Config.model_validate(given) == Config()


def test_the_example_configuration_as_copied_only_observes():
    text = (SITE / "config.yaml.example").read_text()
    assert yaml.safe_load(text) is None


def test_check_finds_nothing_to_say_about_our_slurm_conf():
    text = (SITE / "slurm.conf.d/slurm-ext.conf.example").read_text()
    pairs = (line.split("=", 1) for line in text.splitlines() if line and line[0] != "#")
    values = {key.lower(): value for key, value in pairs}
    values |= {
        "accountingstorageenforce": "associations,limits,qos",
        "preempttype": "preempt/partition_prio",
        "preemptmode": "REQUEUE",
    }
    lines = list(slurm_questions(SlurmConfig("24.11.5", values), RESIZING))
    assert {line.name: line.level for line in lines if line.level is not Level.OK} == {}
    assert "lua" in values["jobsubmitplugins"]


@pytest.mark.parametrize("left_out", ["PriorityType", "PriorityFlags", "SchedulerParameters"])
def test_check_misses_a_line_that_is_left_out(left_out: str):
    text = (SITE / "slurm.conf.d/slurm-ext.conf.example").read_text()
    pairs = (line.split("=", 1) for line in text.splitlines() if line and line[0] != "#")
    values = {key.lower(): value for key, value in pairs if key != left_out}
    values["accountingstorageenforce"] = "limits"
    found = {line.level for line in slurm_questions(SlurmConfig("24.11.5", values), RESIZING)}
    assert Level.MEND in found


@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.name)
def test_commands_of_the_units_exist(path: Path):
    started = (
        [v for k, v in unit(path)["Service"].items() if k.startswith("Exec")]
        if (path.suffix == ".service")
        else []
    )
    ours = [shlex.split(line) for line in started if "slurm-ext" in line]
    assert ours or path.suffix == ".timer"
    for words in ours:
        build_parser().parse_args(words[words.index("slurm-ext") + 1 :])


@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.name)
def test_manual_pages_that_the_units_name_exist(path: Path):
    pages = re.findall(r"man:([\w-]+)\((\d)\)", path.read_text())
    assert pages
    for page, section in pages:
        assert (SITE / "man" / f"{page}.{section}").exists()


def test_the_units_may_write_where_the_defaults_lie():
    config = Config()
    daemon = unit(SITE / "slurm-ext.service")["Service"]
    release = unit(SITE / "slurm-ext-release.service")["Service"]
    for service in (daemon, release):
        state = Path("/var/lib") / service["StateDirectory"]
        assert config.journal.parent == state == config.table.parent
        assert str(config.spool) in service["ReadWritePaths"].split()
        assert service["ProtectSystem"] == "strict"  # else the lines above mean nothing
    assert Path("/run") / daemon["RuntimeDirectory"] == config.heartbeat.parent
    assert daemon["RuntimeDirectoryPreserve"] == "yes"


def test_the_daemon_is_released_after_it_stops_and_by_a_timer_without_it():
    daemon = unit(SITE / "slurm-ext.service")
    assert daemon["Service"]["ExecStopPost"].endswith("slurm-ext release")
    assert "slurm-ext-release.timer" in daemon["Unit"]["Wants"].split()
    release = unit(SITE / "slurm-ext-release.service")
    assert release["Service"]["ExecStart"].endswith("slurm-ext release --if-stale")
    # It must not stop, or fail to start, together with the daemon.
    assert not set(release["Unit"]) & {"Requires", "BindsTo", "PartOf", "After"}
    assert not set(unit(SITE / "slurm-ext-release.timer")["Unit"]) & {"Requires", "PartOf"}


def test_the_units_run_as_the_user_that_lua_lets_pass():
    user = re.search(r'daemon_user = "(.*)"', (SITE / "lua/config.lua.example").read_text())
    assert user is not None
    for path in UNITS:
        if path.suffix == ".service":
            assert unit(path)["Service"]["User"] == user[1]
    assert f"add user {user[1]} " in (SITE / "README.md").read_text()
    assert (
        f"useradd --system --no-create-home --shell /usr/sbin/nologin {user[1]}"
        in (SITE / "README.md").read_text()
    )


def test_lua_has_the_defaults_that_its_example_shows():
    setting = re.compile(r"^    (\w+) = (.*),$", re.MULTILINE)
    example = dict(setting.findall((SITE / "lua/config.lua.example").read_text()))
    module = (SITE / "lua/slurm_ext.lua").read_text()
    defaults = module.partition("M.config = {")[2].partition("\n}")[0]
    assert dict(setting.findall(defaults)) == example
    assert float(example["submit_grace_s"]) == Config().grace_s == DEFAULT_GRACE_S
    assert grace(SITE / "lua/config.lua.example", Config().grace_s).level is Level.OK


def test_the_readme_installs_the_configuration_where_it_is_read():
    assert str(DEFAULT_PATH) in (SITE / "README.md").read_text()
