"""What ``ft-run`` costs before the user's program starts.

    python -m tests.bench.startup [--rounds 40] [--json FILE]

Pairs, in turns in one run: ``python3 -c pass`` and ``ft-run -- COMMAND`` with the same interpreter,
through a script such as pip writes for an entry point, on a rank of a made-up Slurm step (no
cluster is needed: a rank asks Slurm nothing before its program starts). The interpreter is that of
a fresh virtual environment: whatever an installation imports at every start (path hooks,
certificates) would make ``python3 -c pass`` longer and the ratio smaller.

``before the program`` is from the start of ft-run to the first byte that the program writes, which
contains the start of the program (``/bin/echo``), ``whole run`` to the end of ``/bin/true`` under
ft-run. Of all pairs the faster half counts: other work on the machine only ever adds, and it adds
more to the longer run. Exits with 1 where the median ratio before the program is above 3.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.document import Mode, PlanDocument
from slurm_ext.domain.plan import Decision, Verdict
from slurm_ext.domain.policy import Permit

WANTED_RATIO = 3.0
ROOT = Path(__file__).parents[2]
_SCRIPT = """import re
import sys
from slurm_ft.launch.main import main
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit(main())
"""
_STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[007-008]",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_LOCALID": "1",
    "SLURM_OPEN_MODE": "a",
    "SLURM_RESTART_COUNT": "1",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 only where the target is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="pairs per case (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    if args.rounds < 3:
        parser.error("--rounds: at least 3")
    with tempfile.TemporaryDirectory() as folder:
        cases = measure(Path(folder), args.rounds)
    report(cases)
    if args.json:
        args.json.write_text(json.dumps(cases, indent=1) + "\n")
    missed = [name for name, case in cases.items() if case["ratio"] > WANTED_RATIO]
    for name in missed:
        print(f"missed: {name}: {cases[name]['ratio']:.2f} times, wanted {WANTED_RATIO:g}")
    return 1 if missed else 0


def measure(folder: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """Each case with its pairs, all cases in turns so that other load hits them alike."""
    venv.create(folder / "venv")
    python = str(folder / "venv" / "bin" / "python3")
    script = folder / "ft-run"
    script.write_text(_SCRIPT)
    plans = folder / "spool" / "plans"
    plans.mkdir(parents=True)
    (plans / "77.json").write_text(_plan())
    base = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "PYTHONPATH": f"{ROOT / 'wrappers'}:{ROOT}",
        # As an administrator's installation: nobody writes byte code beside it.
        "PYTHONDONTWRITEBYTECODE": "",
    }
    planned = {**base, **_STEP, "FT_SPOOL": str(folder / "spool"), "SLURM_PROCID": "1"}
    unplanned = {**planned, "FT_SPOOL": str(folder / "none")}
    cases = {
        "rank 1, no plan": unplanned,
        "rank 1, a plan of 8 GPUs": planned,
        "rank 0, a plan of 8 GPUs": {**planned, "SLURM_PROCID": "0"},
        "outside Slurm": base,
    }
    bare = [python, "-c", "pass"]
    run = [python, str(script), "--"]
    pairs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
    for env in cases.values():  # byte code and page cache
        _until_byte([*run, "/bin/echo"], env)
    for _ in range(rounds):
        for name, env in cases.items():
            alone = _whole(bare, env)
            before = _until_byte([*run, "/bin/echo"], env)
            whole = _whole([*run, "/bin/true"], env)
            pairs[name].append((alone, before, whole))
    return {name: _summary(found) for name, found in pairs.items()}


def _summary(pairs: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    rounds = len(pairs)
    pairs = sorted(pairs, key=lambda pair: pair[0] + pair[1])[: (rounds + 1) // 2]
    ratios = sorted(before / alone for alone, before, _ in pairs)
    quarter = len(ratios) // 4
    return {
        "rounds": rounds,
        "python_ms": statistics.median(p[0] for p in pairs) * 1e3,
        "before_ms": statistics.median(p[1] for p in pairs) * 1e3,
        "whole_ms": statistics.median(p[2] for p in pairs) * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[quarter], ratios[-1 - quarter]],
        "whole_ratio": statistics.median(whole / alone for alone, _, whole in pairs),
    }


def report(cases: dict[str, dict[str, Any]]) -> None:
    """The table."""
    head = ("case", "python3 -c pass", "before the program", "ratio (quartiles)", "whole run")
    rows = [head]
    for name, case in cases.items():
        low, high = case["ratio_quartiles"]
        rows.append(
            (
                name,
                f"{case['python_ms']:.1f} ms",
                f"{case['before_ms']:.1f} ms",
                f"{case['ratio']:.2f} ({low:.2f}-{high:.2f})",
                f"{case['whole_ms']:.1f} ms, {case['whole_ratio']:.2f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        print(
            "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
        )


def _plan() -> str:
    configuration = Configuration(gpus=8, placement=(4, 4), local_batch=16, accumulation=2)
    return PlanDocument(
        job_id="77",
        base_id=77,
        user="alice",
        partition="main",
        made_s=0.0,
        mode=Mode.ACTING,
        policy="titan",
        decision=Decision("77", Verdict.START, 0, "", configuration=configuration),
        permit=Permit(),
        attempt=1,
    ).to_json()


def _whole(argv: Sequence[str], env: dict[str, str]) -> float:
    """Seconds from the start of a process to its end."""
    begun = time.perf_counter()
    pid = os.posix_spawn(argv[0], list(argv), env)
    _, status = os.waitpid(pid, 0)
    took = time.perf_counter() - begun
    if status:
        raise RuntimeError(f"{' '.join(argv)}: wait status {status}")
    return took


def _until_byte(argv: Sequence[str], env: dict[str, str]) -> float:
    """Seconds from the start of a process to the first byte that comes out of it."""
    read_end, write_end = os.pipe()
    begun = time.perf_counter()
    pid = os.posix_spawn(
        argv[0],
        list(argv),
        env,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, write_end, 1),
            (os.POSIX_SPAWN_CLOSE, read_end),
        ],
    )
    os.close(write_end)
    first = os.read(read_end, 1)
    took = time.perf_counter() - begun
    os.close(read_end)
    _, status = os.waitpid(pid, 0)
    if not first or status:
        raise RuntimeError(f"{' '.join(argv)}: wait status {status}, output {first!r}")
    return took


if __name__ == "__main__":
    sys.exit(main())
