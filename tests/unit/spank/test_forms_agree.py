"""`explain --script` foretells what the Lua module does: same form, same shape, same refusals."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurm_ext.domain.directive import extract_from_admin_comment
from slurm_ext.domain.errors import DirectiveError
from slurm_ext.domain.forms import form_of
from slurm_ext.domain.script import parse_script
from tests.unit.spank.peers import LUA_MODULE, LUAS
from tests.unit.spank.test_lua_module import UNSET, _lua

NOW_S = 1_764_450_000.0
CASES = 1500


def _options(rng: random.Random) -> dict[str, str]:
    """A random request, of which about half can be resized."""
    found: dict[str, str] = {}

    def maybe(name: str, chance: float, *values: str) -> None:
        if rng.random() < chance:
            found[name] = rng.choice(values)

    maybe("nodes", 0.5, "1", "2", "3", "1-4", "2-3")
    maybe("ntasks", 0.5, "1", "2", "3", "4", "8")
    maybe("ntasks-per-node", 0.3, "1", "2", "4")
    maybe("cpus-per-task", 0.2, "2", "8")
    maybe("mem", 0.1, "8G", "512M")
    form = rng.choice(["gres", "gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-task"])
    if rng.random() < 0.95:
        prefix = "gpu:" if form == "gres" else ""
        found[form] = prefix + rng.choice(["1", "2", "4", "8", "v100:4", "a100:1"])
    maybe("exclusive", 0.03, "")
    maybe("nodelist", 0.03, "n1")
    maybe("partition", 0.1, "a", "a,b")
    maybe("gpus-per-socket", 0.02, "1")
    maybe("ntasks-per-gpu", 0.02, "1")
    found["ft-gpus"] = rng.choice(["auto", "auto", "requested", "1,2,4,8", "4,8", "8", "1-16"])
    return found


def _as_sbatch_sends(options: dict[str, str]) -> dict[str, Any]:
    """job_desc for these options, as recorded on Slurm 24.11.5."""
    job: dict[str, Any] = {**UNSET, "environment": {}}
    if "nodes" in options:
        low, _, top = options["nodes"].partition("-")
        job["min_nodes"], job["max_nodes"] = int(low), int(top or low)
    for name, key in (
        ("ntasks", "num_tasks"),
        ("ntasks-per-node", "ntasks_per_node"),
        ("cpus-per-task", "cpus_per_task"),
        ("ntasks-per-gpu", "ntasks_per_tres"),
    ):
        if name in options:
            job[key] = int(options[name])
    if mem := options.get("mem"):
        job["min_mem_per_node"] = int(mem[:-1]) * (1024 if mem.endswith("G") else 1)
    per_task = [f"cpu={options['cpus-per-task']}"] if "cpus-per-task" in options else []
    if "gpus-per-task" in options:
        kind, _, count = options["gpus-per-task"].rpartition(":")
        per_task.append(f"gres/gpu:{kind}={count}" if kind else f"gres/gpu={count}")
    if per_task:
        job["tres_per_task"] = ",".join(per_task)
    for name, key, prefix in (
        ("gres", "tres_per_node", "gres/"),
        ("gpus-per-node", "tres_per_node", "gres/gpu:"),
        ("gpus", "tres_per_job", "gres/gpu:"),
        ("gpus-per-socket", "tres_per_socket", "gres/gpu:"),
    ):
        if name in options:
            job[key] = prefix + options[name]
    if "exclusive" in options:
        job["shared"] = 0
    if "nodelist" in options:
        job["req_nodes"] = options["nodelist"]
    job["partition"] = options.get("partition", "a")
    job["spank_job_env"] = {0: f"SLURM_EXT_DIRECTIVE=gpus={options['ft-gpus']}"}
    return job


def _foretold(options: dict[str, str]) -> Any:
    lines = [f"#SBATCH --{name}={v}" if v else f"#SBATCH --{name}" for name, v in options.items()]
    script = parse_script("\n".join(["#!/bin/sh", *lines, ""]), now_s=NOW_S)
    try:
        return form_of(script)
    except DirectiveError as exc:
        return f"{exc.option}={exc.value}: {exc.reason}; {exc.fix}"


@pytest.mark.skipif(not LUAS, reason="no Lua interpreter (package lua5.4)")
def test_a_script_is_foretold_as_slurmctld_will_see_it(tmp_path: Path) -> None:
    rng = random.Random(11)
    requests = [_options(rng) for _ in range(CASES)]
    cases = "return {\n" + ",\n".join(_lua(_as_sbatch_sends(r)) for r in requests) + "\n}"
    (tmp_path / "cases.lua").write_text(cases)
    (tmp_path / "run.lua").write_text(
        """
        slurm = { SUCCESS = 0, log_error = function(f, ...) print("log " .. f:format(...)) end }
        local message
        slurm.log_user = function(f, ...) message = f:format(...) end
        local m = dofile(arg[1] .. "/slurm_ext.lua")
        for _, job in ipairs(dofile(arg[2])) do
            message = nil
            local rc = m.submit(job)
            print(rc == 0 and job.admin_comment or "no " .. tostring(message))
        end
        """
    )
    assert shutil.which(LUAS[-1])
    answer = subprocess.run(
        [LUAS[-1], str(tmp_path / "run.lua"), str(LUA_MODULE), str(tmp_path / "cases.lua")],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    lines = answer.stdout.splitlines()
    assert len(lines) == CASES
    kinds: dict[str, int] = {}
    for options, line in zip(requests, lines, strict=True):
        foretold = _foretold(options)
        if line.startswith("no "):
            assert foretold == line[3:], options
            kinds["refused"] = kinds.get("refused", 0) + 1
            continue
        seen = extract_from_admin_comment(line)
        assert seen is not None, line
        assert foretold == (seen.shape, seen.req), options
        kinds[str(seen.shape)] = kinds.get(str(seen.shape), 0) + 1
    assert len(kinds) == 6, kinds  # five kinds and the refusals all occurred
    assert min(kinds.values()) >= 10, kinds
