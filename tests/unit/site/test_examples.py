"""The example batch scripts: their directives are valid, and their bodies read their counts.

Each body runs in bash with stand-ins for srun, scontrol and the launchers, in the environment that
Slurm would give it for every GPU count of its list.
"""

from __future__ import annotations

import csv
import gzip
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from slurm_ext.domain.directive import Directive
from slurm_ext.domain.forms import form_of
from slurm_ext.domain.script import parse_script
from slurm_ext.estimate.starter import STARTER_FILES, starter_bytes
from tests.unit.site.prose import SITE, forms

EXAMPLES = sorted((SITE / "examples").glob("*.sbatch"))
GPUS_PER_NODE = 4
# sbatch options of the examples; a typing error in one of them must not pass for a new option.
SBATCH = {
    *("job-name", "time", "output", "comment", "nodes", "ntasks", "ntasks-per-node", "gres"),
    *("gpus", "gpus-per-task", "cpus-per-task", "cpus-per-gpu", "mem-per-gpu"),
    *("open-mode", "signal"),
}
every = pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)


def words_of(path: Path) -> dict[str, str]:
    """``--name=value`` of the ``#SBATCH`` lines."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if line.startswith("#SBATCH "):
            for word in shlex.split(line.removeprefix("#SBATCH ")):
                match = re.fullmatch(r"--([a-z-]+)=(.+)", word)
                assert match, f"{word} is not --NAME=VALUE"
                assert match[1] not in found, f"--{match[1]} twice"
                found[match[1]] = match[2]
    return found


def directive_of(path: Path) -> Directive:
    return parse_script(path.read_text(), now_s=0.0, place=path.name).directive


def requested_gpus(words: dict[str, str]) -> int:
    if "gpus-per-task" in words:
        return int(words["gpus-per-task"]) * int(words["ntasks"])
    if "gpus" in words:
        return int(words["gpus"])
    return int(words["gres"].removeprefix("gpu:")) * int(words["nodes"])


def most_gpus(words: dict[str, str]) -> int:
    """What the form can take: one node, or several."""
    one_node = words.get("nodes") == "1"
    return GPUS_PER_NODE if one_node else 16


def granted(words: dict[str, str], gpus: int) -> dict[str, str]:
    """The environment of a job that got ``gpus`` GPUs."""
    nodes = -(-gpus // GPUS_PER_NODE)
    environment = {
        "SLURM_JOB_ID": "123",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": f"n[1-{nodes}]",
        "SLURMD_NODENAME": "n1",
        "SLURM_GPUS_ON_NODE": str(gpus // nodes),
        "SLURM_CPUS_PER_TASK": "8",
    }
    if "ntasks-per-node" in words:
        environment["SLURM_NTASKS"] = str(nodes * int(words["ntasks-per-node"]))
    elif words.get("ntasks", "1") == "1":
        environment["SLURM_NTASKS"] = "1"
    else:
        environment["SLURM_NTASKS"] = str(gpus)
    return environment


@dataclass(frozen=True)
class Run:
    """What a body started."""

    launcher: list[str]
    environment: dict[str, str]

    def value(self, *names: str) -> int | None:
        for name in names:
            for at, word in enumerate(self.launcher):
                if word == name:
                    return int(self.launcher[at + 1])
                if word.startswith(f"{name}="):
                    return int(word.partition("=")[2])
        return None


RunBody = Callable[[Path, dict[str, str]], Run]


@pytest.fixture
def run_body(tmp_path: Path) -> RunBody:
    """Run a script's body, and return what it started; fails where the script does."""
    stub = '#!/bin/bash\n{ echo "${0##*/}"; printf "%s\\n" "$@"; } > "$RECORD"\n'
    for name in ("python", "torchrun", "accelerate"):
        (tmp_path / name).write_text(stub)
    options = 'while [ "${1#-}" != "$1" ]; do shift; done\n'
    (tmp_path / "srun").write_text(f'#!/bin/bash\nenv > "$RECORD.env"\n{options}exec "$@"\n')
    # The real parser of ft-run says where the options end.
    (tmp_path / "ft-run").write_text(
        f"#!{sys.executable}\nimport os, sys\nsys.path[:0] = {sys.path!r}\n"
        "from slurm_ft.launch.options import parse\n"
        "command = parse(sys.argv[1:], os.environ).command\nos.execvp(command[0], command)\n"
    )
    (tmp_path / "scontrol").write_text(
        '#!/bin/bash\n[ "$1 $2" = "show hostnames" ] || exit 1\necho n1\necho n2\n'
    )
    for name in ("python", "torchrun", "accelerate", "srun", "scontrol", "ft-run"):
        (tmp_path / name).chmod(0o755)

    def run(path: Path, environment: dict[str, str]) -> Run:
        record = tmp_path / "record"
        base = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(record)}
        done = subprocess.run(
            ["bash", str(path)],
            env={**base, **environment},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"exit code {done.returncode}: {done.stderr}")
        seen = (tmp_path / "record.env").read_text().splitlines()
        return Run(
            record.read_text().split("\n")[:-1],
            dict(line.split("=", 1) for line in seen if "=" in line),
        )

    return run


def test_there_is_one_for_each_way_to_start_ranks():
    names = {path.stem for path in EXAMPLES}
    assert {"rank-per-gpu", "torchrun", "single-node", "lightning", "accelerate"} <= names
    assert {"mpi", "hooks", "without-plugin"} <= names


@every
def test_it_comes_back_and_its_program_lies_beside_it(path: Path):
    """Field case log-overwrite: a requeue without --open-mode=append empties the output."""
    words, text = words_of(path), path.read_text()
    assert words["open-mode"] == "append"
    assert words["signal"].startswith("USR2@")
    assert "ft-run" in text
    programs = re.findall(r"[\w.-]+\.py", text)
    assert programs
    assert all((path.parent / name).is_file() for name in programs)


@every
def test_bash_takes_it(path: Path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert path.read_text().startswith("#!/bin/bash\n")


@every
def test_its_options_are_known_and_its_directive_is_valid(path: Path):
    words = words_of(path)
    assert {name for name in words if not name.startswith("ft-")} <= SBATCH
    directive = directive_of(path)
    assert directive.model in starter_models()
    assert directive.total_samples(directive.batch_min)
    assert directive.gpus.resizable
    assert directive.gpus.allows(requested_gpus(words))


@every
def test_it_has_the_form_that_its_readme_says(path: Path):
    script = parse_script(path.read_text(), now_s=0.0, place=path.name)
    kind, requested = form_of(script)
    assert kind.value == forms()[path.name]
    assert requested.gpus == requested_gpus(words_of(path)) == script.gpus


@cache
def starter_models() -> set[str]:
    packed = next(name for name in STARTER_FILES if name.endswith(".gz"))
    rows = csv.DictReader(gzip.decompress(starter_bytes(packed)).decode().splitlines())
    return {row["model"] for row in rows}


@every
def test_it_keeps_the_global_batch_on_every_count(path: Path, run_body: RunBody):
    words, directive = words_of(path), directive_of(path)
    batch = directive.batch_min
    assert batch is not None
    assert batch == directive.batch_max
    counts = directive.resolve_gpu_counts(requested_gpus(words), most_gpus(words))
    assert len(counts) >= 3
    for gpus in counts:
        environment = granted(words, gpus)
        for extra in ({"FT_BATCH": str(batch)}, {}):  # with the plugin, and where it is passive
            ran = run_body(path, {**environment, **extra})
            ranks = ran.value("--num_processes") or (
                (ran.value("--nnodes") or 0) * (ran.value("--nproc-per-node") or 0)
            )
            ranks = ranks or int(environment["SLURM_NTASKS"])
            assert ranks == gpus
            local = ran.value("--local-batch", "--per_device_train_batch_size")
            assert local is not None
            assert ranks * local * (ran.value("--accumulate") or 1) == batch


@every
def test_it_refuses_a_count_that_cannot_share_the_batch(path: Path, run_body: RunBody):
    words = words_of(path)
    # 7 is no multiple of any requested count, 256 none of 3.
    odd = {"SLURM_NTASKS": "3"} if "comment" in words else {"FT_BATCH": "7"}
    with pytest.raises(AssertionError, match="cannot share a batch of"):
        run_body(path, {**granted(words, requested_gpus(words)), **odd})


@pytest.mark.parametrize(
    "path", [p for p in EXAMPLES if "cpus-per-task" in words_of(p)], ids=lambda p: p.stem
)
def test_its_steps_get_the_cpus_of_the_job(path: Path, run_body: RunBody):
    words = words_of(path)
    ran = run_body(path, granted(words, requested_gpus(words)))
    assert ran.environment["SRUN_CPUS_PER_TASK"] == "8"


def test_local_batches_that_do_not_fit_are_accumulated(run_body: RunBody):
    path = SITE / "examples/rank-per-gpu.sbatch"
    ran = run_body(path, {**granted(words_of(path), 1), "FT_BATCH": "256"})
    assert (ran.value("--local-batch"), ran.value("--accumulate")) == (64, 4)
