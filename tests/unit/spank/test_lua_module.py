"""The Lua module against a fake slurmctld: what it writes, refuses, leaves alone and survives."""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slurm_ext.domain.directive import Directive, RequestedShape, extract_from_admin_comment
from slurm_ext.domain.job import ShapeKind
from tests.unit.spank.peers import LUA_MODULE, ROOT
from tests.unit.spank.values import longest

NO_VAL, NO_VAL16 = 4294967294, 65534
DAEMON_UID, USER_UID = 900, 2001
# What sbatch sends when nothing is asked for, as recorded from job_desc on Slurm 24.11.5.
UNSET: dict[str, Any] = {
    "min_nodes": NO_VAL,
    "max_nodes": NO_VAL,
    "num_tasks": NO_VAL,
    "ntasks_per_node": NO_VAL16,
    "ntasks_per_tres": NO_VAL16,
    "cpus_per_task": NO_VAL16,
    "min_cpus": 1,
    "begin_time": 0,
    "shared": NO_VAL16,
    "het_job_offset": NO_VAL,
    "script": "#!/bin/bash",
    "environment": {"PATH": "/bin"},
}


@dataclass
class Seen:
    """What came out of one call."""

    rc: int = -99
    user: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    site: list[str] = field(default_factory=list)
    job: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def directive(self) -> Directive:
        """The directive that the daemon will read."""
        found = extract_from_admin_comment(self.job["admin_comment"])
        assert found is not None
        return found


def _lua(value: object) -> str:
    if isinstance(value, dict):
        items = (f"[{_lua(k)}] = {_lua(v)}" for k, v in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, str):
        return '"' + "".join(f"\\{b:03d}" for b in value.encode()) + '"'
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture(params=["lua5.1", "lua5.4"])
def lua(request: pytest.FixtureRequest) -> str:
    """A Lua interpreter."""
    if not shutil.which(request.param):
        pytest.skip(f"{request.param} is not installed (package {request.param})")
    return str(request.param)


@pytest.fixture
def call(lua: str, tmp_path: Path) -> Any:
    """Run the module for one request."""

    def run(job: dict[str, Any] | None = None, *, ft: str | None = None, **case: Any) -> Seen:
        fields = {**UNSET, "environment": dict(UNSET["environment"]), **(job or {})}
        for name in [name for name, value in fields.items() if value is None]:
            del fields[name]
        if ft is not None:
            fields["spank_job_env"] = {0: "_OTHER=1", 1: f"SLURM_EXT_DIRECTIVE={ft}"}
        path = tmp_path / "case.lua"
        path.write_text("return " + _lua({"job": fields, **case}))
        script = Path(__file__).parent / "submit_check.lua"
        result = subprocess.run(
            [lua, str(script), str(LUA_MODULE), str(path)],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        seen = Seen()
        for line in result.stdout.splitlines():
            kind, _, text = line.partition("\t")
            if kind == "rc":
                seen.rc = int(text)
            elif kind in ("user", "log", "site"):
                getattr(seen, kind).append(text)
            elif kind.startswith("env."):
                seen.env[kind[4:]] = text
            else:
                seen.job[kind] = text
        return seen

    return run


PER_RANK = {"num_tasks": 4, "tres_per_task": "cpu=2,gres/gpu=1", "cpus_per_task": 2}


def test_the_plugins_directive_goes_into_admin_comment(call: Any) -> None:
    seen = call(PER_RANK, ft="model=vit-large@main samples=50000 epochs=3 gpus=1-2,4,8")
    assert (seen.rc, seen.user, seen.log) == (0, [], [])
    directive = seen.directive
    assert (directive.model, directive.revision) == ("vit-large", "main")
    assert (directive.samples, directive.epochs) == (50000, 3.0)
    assert str(directive.gpus) == "1-2,4,8"
    assert directive.shape is ShapeKind.RANK_PER_GPU
    assert directive.req == RequestedShape(
        gpus=4, nodes=1, ntasks=4, gpus_per_task=1, cpus_per_task=2
    )
    assert seen.env["FT_MODEL"] == "vit-large@main"
    assert seen.env["FT_DIRECTIVE"] in seen.job["admin_comment"]


def test_a_job_without_directive_is_left_alone(call: Any) -> None:
    seen = call({"num_tasks": 4, "tres_per_job": "gres/gpu:4", "comment": "left: alone"})
    plain = call(
        {"num_tasks": 4, "tres_per_job": "gres/gpu:4", "comment": "left: alone"}, site="none"
    )
    assert seen.rc == plain.rc == 0
    assert "admin_comment" not in seen.job
    assert seen.job["begin_time"] == "0"
    assert seen.env == {"PATH": "/bin"}


def test_what_the_site_keeps_in_admin_comment_stays(call: Any) -> None:
    seen = call(PER_RANK, ft="samples=5", site_comment="billing=x17")
    assert seen.job["admin_comment"].startswith('billing=x17 ft:{"v":1,')
    assert seen.directive.samples == 5


@pytest.mark.parametrize(
    "forged", ['ft:{"v":1,"samples":999}', 'a ft:{"v":1,"req":{"gpus":1}} b', "ft:{"]
)
def test_a_directive_that_is_there_already_is_taken_out(call: Any, forged: str) -> None:
    seen = call(PER_RANK, ft="samples=5", site_comment=forged)
    assert seen.job["admin_comment"].count("ft:{") == 1
    assert seen.directive.samples == 5
    without = call(PER_RANK, site_comment=forged)
    assert "ft:{" not in without.job.get("admin_comment", "")


def test_the_comment_counts_where_the_plugin_is_absent(call: Any) -> None:
    seen = call({**PER_RANK, "comment": "run 7; ft: model=vit gpus=auto samples=9 ; more"})
    assert seen.rc == 0
    assert (seen.directive.model, seen.directive.samples) == ("vit", 9)
    assert seen.job["comment"] == "run 7; ft: model=vit gpus=auto samples=9 ; more"


def test_the_comment_fills_only_what_is_absent(call: Any) -> None:
    seen = call({**PER_RANK, "comment": "ft: samples=9 steps=7 model=x"}, ft="samples=5 epochs=2")
    directive = seen.directive
    assert (directive.samples, directive.epochs, directive.steps) == (5, 2.0, None)
    assert directive.model == "x"


@pytest.mark.parametrize(
    ("comment", "words"),
    [
        ("ft: epochs=three", "--ft-epochs=three: not a decimal number; write a number above 0"),
        ("ft: epochs=3 steps=4", "--ft-steps=4: --ft-epochs=3 is also given"),
        ("ft: colour=red", "--ft-colour=red: there is no such option"),
        ("ft: model", "model: not NAME=VALUE"),
    ],
)
def test_a_bad_directive_is_refused_with_the_fix(call: Any, comment: str, words: str) -> None:
    seen = call({**PER_RANK, "comment": comment})
    assert seen.rc == 22
    assert len(seen.user) == 1
    assert words in seen.user[0]
    assert "admin_comment" not in seen.job


def test_what_a_client_sends_is_checked_again(call: Any) -> None:
    seen = call(PER_RANK, ft='model=x"}\n999 samples=5')
    assert seen.rc == 22
    assert "\n" not in "".join(seen.user)


@dataclass(frozen=True)
class Form:
    """A way to ask for GPUs, and what must come of it."""

    job: dict[str, Any]
    shape: str
    req: RequestedShape
    after: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    gpus: str = "auto"


FORMS = {
    "-n4 --gpus-per-task=1": Form(
        {"num_tasks": 4, "tres_per_task": "gres/gpu=1"},
        "rank-per-gpu",
        RequestedShape(4, 1, 4, gpus_per_task=1),
        {"num_tasks": "4", "tres_per_task": "gres/gpu=1"},
    ),
    "-N2 -n8 --gpus-per-task=1 -c2": Form(
        {"min_nodes": 2, "max_nodes": 2, "num_tasks": 8, "cpus_per_task": 2}
        | {"tres_per_task": "cpu=2,gres/gpu=1"},
        "rank-per-gpu",
        RequestedShape(8, 2, 8, gpus_per_task=1, cpus_per_task=2),
    ),
    "-N1-4 -n4 --gpus-per-task=1": Form(
        {"min_nodes": 1, "max_nodes": 4, "num_tasks": 4, "tres_per_task": "gres/gpu=1"},
        "rank-per-gpu",
        RequestedShape(4, 1, 4, gpus_per_task=1, nodes_max=4),
    ),
    "older spelling": Form(
        {"num_tasks": 2, "tres_per_task": "gres:gpu:a100:1"},
        "rank-per-gpu",
        RequestedShape(2, 1, 2, gpus_per_task=1, gpu_type="a100"),
    ),
    "-N2 --ntasks-per-node=1 --gres=gpu:4": Form(
        {"min_nodes": 2, "max_nodes": 2, "ntasks_per_node": 1, "tres_per_node": "gres/gpu:4"},
        "launcher-per-node",
        RequestedShape(8, 2, 2, gpus_per_node=4),
        {"ntasks_per_node": "1", "tres_per_node": "gres/gpu:4"},
    ),
    "-N2 -n2 --gres=gpu:v100:4 --mem=8G": Form(
        {"min_nodes": 2, "max_nodes": 2, "num_tasks": 2, "tres_per_node": "gres/gpu:v100:4"}
        | {"min_mem_per_node": 8192},
        "launcher-per-node",
        RequestedShape(8, 2, 2, gpus_per_node=4, gpu_type="v100", memory_node_mib=8192),
        {"ntasks_per_node": "1"},
        {"SLURM_NTASKS_PER_NODE": "1"},
    ),
    "--gres=gpu:4": Form(
        {"tres_per_node": "gres/gpu:4"},
        "launcher-per-node",
        RequestedShape(4, 1, 1, gpus_per_node=4, nodes_max=1),
        {"min_nodes": str(NO_VAL), "ntasks_per_node": str(NO_VAL16)},
    ),
    "-N1-4 --gres=gpu:4": Form(
        {"min_nodes": 1, "max_nodes": 4, "tres_per_node": "gres/gpu:4"},
        "launcher-per-node",
        RequestedShape(4, 1, 1, gpus_per_node=4, nodes_max=4),
    ),
    "--gpus=4": Form(
        {"tres_per_job": "gres/gpu:4", "environment": {"SLURM_GPUS": "4"}},
        "launcher-per-node",
        RequestedShape(4, 1, 1, gpus_per_node=4, nodes_max=1),
        {"tres_per_node": "gres/gpu:4", "min_nodes": "1", "max_nodes": "1"},
        {"SLURM_GPUS": ""},
    ),
    "--gpus=v100:4 -N1 -n4": Form(
        {"tres_per_job": "gres/gpu:v100:4", "min_nodes": 1, "max_nodes": 1, "num_tasks": 4}
        | {"environment": {"SLURM_GPUS": "v100:4"}},
        "single-node",
        RequestedShape(4, 1, 4, gpus_per_node=4, nodes_max=1, gpu_type="v100"),
        {"tres_per_node": "gres/gpu:v100:4"},
        {"SLURM_GPUS": ""},
    ),
    "-N2 --ntasks-per-node=1 --gpus=8": Form(
        {"tres_per_job": "gres/gpu:8", "min_nodes": 2, "max_nodes": 2, "ntasks_per_node": 1}
        | {"environment": {"SLURM_GPUS": "8"}},
        "launcher-per-node",
        RequestedShape(8, 2, 2, gpus_per_node=4),
        {"tres_per_node": "gres/gpu:4", "min_nodes": "2", "max_nodes": "2"},
        {"SLURM_GPUS": ""},
    ),
    "-N2 --gpus-per-node=4 --ntasks-per-node=1": Form(
        {"tres_per_node": "gres/gpu:4", "min_nodes": 2, "max_nodes": 2, "ntasks_per_node": 1}
        | {"environment": {"SLURM_GPUS_PER_NODE": "4"}},
        "launcher-per-node",
        RequestedShape(8, 2, 2, gpus_per_node=4),
        {},
        {"SLURM_GPUS_PER_NODE": ""},
    ),
    "-N1 -n4 --gres=gpu:4": Form(
        {"min_nodes": 1, "max_nodes": 1, "num_tasks": 4, "tres_per_node": "gres/gpu:4"},
        "single-node",
        RequestedShape(4, 1, 4, gpus_per_node=4, nodes_max=1),
    ),
    "-n4 --gres=gpu:4": Form(
        {"num_tasks": 4, "tres_per_node": "gres/gpu:4"},
        "single-node",
        RequestedShape(4, 1, 4, gpus_per_node=4, nodes_max=1),
        {"min_nodes": "1", "max_nodes": "1"},
    ),
    "-N2 --ntasks-per-node=4 --gres=gpu:4": Form(
        {"min_nodes": 2, "max_nodes": 2, "ntasks_per_node": 4, "tres_per_node": "gres/gpu:4"},
        "tasks-per-node",
        RequestedShape(8, 2, 8, gpus_per_node=4),
        gpus="4,8,16",
    ),
    "-N2 -n8 --gres=gpu:4": Form(
        {"min_nodes": 2, "max_nodes": 2, "num_tasks": 8, "tres_per_node": "gres/gpu:4"},
        "tasks-per-node",
        RequestedShape(8, 2, 8, gpus_per_node=4),
        {"ntasks_per_node": "4"},
        {"SLURM_NTASKS_PER_NODE": "4"},
    ),
    "-N2 --ntasks-per-node=4 --gpus-per-task=1": Form(
        {"min_nodes": 2, "max_nodes": 2, "ntasks_per_node": 4, "tres_per_task": "gres/gpu=1"},
        "tasks-per-node",
        RequestedShape(8, 2, 8, gpus_per_node=4, gpus_per_task=1),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_recognised_and_made_to_follow(call: Any, name: str) -> None:
    form = FORMS[name]
    seen = call(form.job, ft=f"model=m gpus={form.gpus}")
    assert (seen.rc, seen.user, seen.log) == (0, [], [])
    assert seen.directive.shape == ShapeKind(form.shape)
    assert seen.directive.req == form.req
    assert {key: seen.job.get(key) for key in form.after} == form.after
    assert {key: seen.env.get(key) for key in form.env} == form.env
    if form.env.get("SLURM_GPUS") == "":
        assert "tres_per_job" not in seen.job
    now = time.time()
    assert now < int(seen.job["begin_time"]) <= now + 6


@pytest.mark.parametrize("name", FORMS)
def test_no_form_is_touched_with_the_default_gpus(call: Any, name: str) -> None:
    form = FORMS[name]
    before = {**UNSET, "environment": {}, **form.job}
    seen = call(form.job, ft="model=m")
    assert seen.rc == 0
    assert seen.directive.shape is ShapeKind.FIXED
    for key, value in before.items():
        if key != "environment":
            assert seen.job.get(key) == str(value), key
    assert before["environment"].items() <= seen.env.items()
    assert seen.directive.req is not None
    assert seen.directive.req.gpus == form.req.gpus


REFUSED = {
    "no GPU": ({}, "auto", "asks for no GPU"),
    "-n8 --gpus=8": (
        {"num_tasks": 8, "tres_per_job": "gres/gpu:8"},
        "auto",
        "-n 8 --gpus-per-task=1",
    ),
    "-N2 --gpus=7": (
        {"min_nodes": 2, "max_nodes": 2, "ntasks_per_node": 1, "tres_per_job": "gres/gpu:7"},
        "auto",
        "unevenly",
    ),
    "-N1 -n3 --gres=gpu:4": (
        {"min_nodes": 1, "max_nodes": 1, "num_tasks": 3, "tres_per_node": "gres/gpu:4"},
        "auto",
        "3 tasks on 4 GPUs",
    ),
    "--ntasks-per-gpu": ({"num_tasks": 4, "ntasks_per_tres": 1}, "auto", "--ntasks-per-gpu"),
    "per socket": ({"tres_per_socket": "gres/gpu:1"}, "auto", "per socket"),
    "-n2 --gpus-per-task=4": (
        {"num_tasks": 2, "tres_per_task": "gres/gpu=4"},
        "auto",
        "-N 2 --ntasks-per-node=1 --gres=gpu:4",
    ),
    "not in the list": (PER_RANK, "1-2", "requested 4 GPUs are not in the list"),
    "no multiples": (
        {"min_nodes": 2, "max_nodes": 2, "ntasks_per_node": 4, "tres_per_node": "gres/gpu:4"},
        "1-2,8",
        "multiples of 4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_form_that_would_drift_apart_is_refused_with_the_fix(call: Any, name: str) -> None:
    job, gpus, words = REFUSED[name]
    seen = call(job, ft=f"gpus={gpus}")
    assert seen.rc == 2072
    assert len(seen.user) == 1
    assert words in seen.user[0]
    assert seen.user[0].startswith(f"--ft-gpus={gpus}: ")
    assert "admin_comment" not in seen.job


FIXED = {
    "no-script": {"script": None, "environment": None},
    "het": {"het_job_offset": 0},
    "exclusive": {"shared": 0},
    "nodelist": {"req_nodes": "n[1-2]"},
    "partitions": {"partition": "a,b"},
    "qos": {"qos": "a,b"},
    "other-gres": {"tres_per_node": "gres/gpu:4,gres/nic:1"},
    "gpu-forms": {"tres_per_node": "gres/gpu:a:1,gres/gpu:b:1"},
}


@pytest.mark.parametrize("why", FIXED)
def test_what_cannot_be_resized_is_ordered_and_told(call: Any, why: str) -> None:
    job = {"tres_per_node": "gres/gpu:4", **FIXED[why]}
    seen = call(job, ft="gpus=auto model=m")
    assert seen.rc == 0
    assert seen.directive.shape is ShapeKind.FIXED
    assert seen.directive.req is not None
    assert seen.directive.req.why_fixed == why
    assert len(seen.user) == 1
    assert "ordered but not resized" in seen.user[0]
    assert seen.job["begin_time"] == "0"
    quiet = call(job, ft="gpus=auto model=m", config={"tell_users": False})
    assert quiet.user == []


def test_the_users_own_begin_is_recorded_and_kept(call: Any) -> None:
    begin = int(time.time()) + 3600
    seen = call({**PER_RANK, "begin_time": begin}, ft="gpus=auto")
    assert seen.job["begin_time"] == str(begin)
    assert seen.directive.begin_s == begin
    past = call({**PER_RANK, "begin_time": 1000}, ft="gpus=auto")
    assert past.directive.begin_s is None
    assert int(past.job["begin_time"]) > time.time()


def test_the_grace_can_be_switched_off(call: Any) -> None:
    seen = call(PER_RANK, ft="gpus=auto", config={"submit_grace_s": 0})
    assert seen.job["begin_time"] == "0"
    long = call(PER_RANK, ft="gpus=auto", config={"submit_grace_s": 60})
    assert int(long.job["begin_time"]) > time.time() + 50


def test_the_recorded_shape_counts_toward_the_limit(call: Any) -> None:
    job = {"num_tasks": 4000, "tres_per_task": "gres/gpu=1"}
    for size, rc in ((1024, 22), (900, 0)):
        seen = call(job, ft=" ".join(f"{k}={v}" for k, v in longest(size).items()))
        assert seen.rc == rc, seen.user
        assert ("admin_comment" in seen.job) == (rc == 0)
    assert 900 < len(seen.job["admin_comment"]) <= 1024 + len("ft:")


@pytest.mark.parametrize(
    "broken", ["spank_job_env", "comment", "tres_per_node", "begin_time", "admin_comment", "script"]
)
def test_an_error_of_ours_lets_the_job_through(call: Any, broken: str) -> None:
    seen = call(PER_RANK, ft="gpus=auto", break_at=broken)
    assert seen.rc == 0
    assert len(seen.log) == 1
    assert "submitted as a plain one" in seen.log[0]
    assert broken in seen.log[0]


@pytest.mark.parametrize("broken", ["begin_time", "tres_per_node", "admin_comment"])
def test_a_write_that_fails_leaves_no_directive_behind(call: Any, broken: str) -> None:
    job = {"tres_per_job": "gres/gpu:4", "environment": {"SLURM_GPUS": "4"}}
    seen = call(job, ft="gpus=auto", break_set=broken)
    assert seen.rc == 0
    assert len(seen.log) == 1
    assert "admin_comment" not in seen.job


def test_the_site_decides_first(call: Any) -> None:
    seen = call(PER_RANK, ft="gpus=auto", site="refuse")
    assert (seen.rc, seen.site) == (2002, ["submit"])
    assert "admin_comment" not in seen.job
    alone = call(PER_RANK, ft="gpus=auto", site="none")
    assert (alone.rc, alone.site) == (0, [])


def test_the_daemons_updates_pass_the_sites_rules(call: Any) -> None:
    daemon = call(site="refuse", call="modify", uid=DAEMON_UID)
    assert (daemon.rc, daemon.site) == (0, [])
    user = call(site="refuse", call="modify", uid=USER_UID)
    assert (user.rc, user.site) == (2002, ["modify"])
    assert call(site="none", call="modify", uid=USER_UID).rc == 0


def test_the_example_config_holds_the_defaults(lua: str) -> None:
    """Each key of the example exists, with the default that the code has, and no key is missing."""
    code = (
        "slurm = { log_error = print }; "
        f"local m = dofile('{LUA_MODULE}/slurm_ext.lua'); "
        f"local e = dofile('{LUA_MODULE}/config.lua.example'); "
        "for k, v in pairs(e) do assert(m.config[k] == v, k) end "
        "for k in pairs(m.config) do assert(e[k] ~= nil, k) end"
    )
    subprocess.run([lua, "-e", code], check=True, timeout=20)


def test_a_broken_config_file_is_told_and_not_used(lua: str, tmp_path: Path) -> None:
    module = tmp_path / "lua"
    shutil.copytree(LUA_MODULE, module)
    (module / "config.lua").write_text(
        "return { submit_grace_s = 'soon', colour = 1, daemon_user = 'd' }"
    )
    code = (
        "said = {}; slurm = { log_error = function(f, ...) said[#said + 1] = f:format(...) end }; "
        f"local m = dofile('{module}/slurm_ext.lua'); "
        "print(m.config.submit_grace_s, m.config.daemon_user, #said)"
    )
    result = subprocess.run(
        [lua, "-e", code], capture_output=True, text=True, check=True, timeout=20
    )
    assert result.stdout.split() == ["5", "d", "2"]
    (module / "config.lua").write_text("this is not Lua")
    result = subprocess.run(
        [lua, "-e", code], capture_output=True, text=True, check=True, timeout=20
    )
    assert result.stdout.split() == ["5", "slurm-ext", "1"]


@pytest.mark.parametrize("page", ["job_submit.lua", "README.md"])
def test_the_two_lines_are_the_same_everywhere(page: str) -> None:
    text = (ROOT / "site" / page).read_text()
    assert 'local ok, slurm_ext = pcall(dofile, "/etc/slurm/lua/slurm_ext.lua")' in text
    assert "if ok then slurm_ext.wrap()" in text
