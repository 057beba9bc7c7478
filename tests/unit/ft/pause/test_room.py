"""How much of a node's memory one rank may take in a pause."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ft.pause.ladder import PartError
from slurm_ft.pause.room import host_room, ranks_here

GIB = 1 << 30


def machine(root: Path, available: int, own: str, levels: dict[str, dict[str, str]]) -> Path:
    """Files as the kernel shows them."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(
        f"MemTotal: 9999999999 kB\nMemAvailable: {available // 1024} kB\n"
    )
    (root / "proc" / "self" / "cgroup").write_text(own)
    for folder, files in levels.items():
        place = root / "cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name).write_text(text + "\n")
    return root


def room(root: Path, environ: dict[str, str] | None = None) -> int:
    return host_room(environ or {}, root / "proc", root / "cgroup")


def test_a_node_without_limits_is_shared_by_its_ranks(tmp_path: Path) -> None:
    root = machine(tmp_path, 100 * GIB, "0::/\n", {})
    assert room(root) == int(100 * GIB * 0.9)
    assert room(root, {"LOCAL_WORLD_SIZE": "8"}) == int(100 * GIB * 0.9) // 8


def test_the_limit_of_the_job_counts_where_the_node_has_more(tmp_path: Path) -> None:
    """Slurm bounds the job, not the task: a copy beyond it would be an OOM kill."""
    task = "system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
    used = {"memory.current": str(10 * GIB), "memory.stat": f"anon 5\ninactive_file {2 * GIB}"}
    levels = {
        task: {"memory.max": "max", **used},
        "system.slice/slurmstepd.scope/job_7": {"memory.max": str(16 * GIB), **used},
        "system.slice": {"memory.max": "max", **used},
    }
    root = machine(tmp_path, 400 * GIB, f"0::/{task}\n", levels)
    assert room(root) == int(8 * GIB * 0.9)


def test_the_older_cgroups_too(tmp_path: Path) -> None:
    step = "slurm/uid_1/job_7/step_0"
    files = {
        "memory.limit_in_bytes": str(6 * GIB),
        "memory.usage_in_bytes": str(5 * GIB),
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
    }
    own = f"11:cpuset:/elsewhere\n4:memory:/{step}\n0::/\n"
    root = machine(tmp_path, 400 * GIB, own, {f"memory/{step}": files})
    assert room(root) == int(2 * GIB * 0.9)


def test_a_cgroup_that_is_over_its_limit_has_no_room(tmp_path: Path) -> None:
    files = {"memory.max": "10", "memory.current": "20", "memory.stat": ""}
    root = machine(tmp_path, GIB, "0::/job\n", {"job": files})
    assert room(root) == 0


def test_what_is_not_visible_is_no_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, GIB, "0::/../../outside\nnonsense\n", {})
    assert room(root) == int(GIB * 0.9)


def test_a_kernel_that_does_not_tell(tmp_path: Path) -> None:
    root = machine(tmp_path, GIB, "0::/\n", {})
    (root / "proc" / "meminfo").write_text("MemTotal: 5 kB\n")
    with pytest.raises(PartError, match="does not tell"):
        room(root)


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "many"}, 1),
    ],
)
def test_ranks_of_this_node(environ: dict[str, str], ranks: int) -> None:
    assert ranks_here(environ) == ranks
