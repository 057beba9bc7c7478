"""How soon a requeued job runs again: plain Slurm, plain Slurm tuned for it, and with the daemon.

    python -m tests.bench.requeue [--repeats 5] [--wait-default] [--json FILE]

Two containerized clusters, alike but for one thing: in the first, credentials live as long as
Slurm's default says and the daemon runs at its default pace; in the second they live for five
seconds and there is no daemon. A job on a free node requeues itself; measured is the time from the
last thing that its first attempt does to the first line of its second one, always on the same node.
Then a job of two torch ranks under ft-run is told to leave: from the end of its first attempt to
the first step of the second, which includes Python, torch and the loading of the checkpoint.

Exits with 1 when a target is missed: with the daemon at least 10 times sooner than Slurm's default,
and not later than the tuned one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ci.cluster import Cluster
from tests.cluster import ft, ft_hold
from tests.cluster.daemon import Daemon

WANTED_RATIO = 10.0
CYCLE_S = 5.0
NODE = "n1"
RANKS = 2
TRAIN = "ft_train.py --steps 200 --step-s 0.1 --hurry"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 only where every target is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="requeues per row (%(default)s)")
    parser.add_argument(
        "--wait-default", action="store_true", help="wait once for Slurm's delay (two minutes)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    result = measure(args.repeats, args.wait_default)
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for miss in result["missed"]:
        print(f"MISSED: {miss}")
    return 1 if result["missed"] else 0


def measure(repeats: int, wait_default: bool) -> dict[str, Any]:
    """Every row, in seconds, in one run."""
    conf = {k: v for k, v in ft.SPEC.slurm_conf.items() if k != "AuthInfo"}
    found: dict[str, Any] = {}
    with Cluster.start(replace(ft.SPEC, slurm_conf=conf)) as plain:
        ft.install(plain)
        found["default, announced"] = [ft_hold.announced(plain, NODE)]
        if wait_default:
            holds = ft_hold.measure(plain, NODE, ours=False, limit_s=200)
            found["default, waited for"] = [hold.wait_s for hold in holds]
        daemon = Daemon(plain)
        daemon.prepare(cycle_s=CYCLE_S)
        daemon.start()
        daemon.wait_cycles(1)
        found["daemon"] = holds_of(plain, repeats, ours=True)
        found["daemon, first step"] = first_steps(plain, repeats, ft_hold.DIRECTIVE)
        daemon.stop()
    with Cluster.start(ft.SPEC) as tuned:
        ft.install(tuned)
        found["cred_expire=5"] = holds_of(tuned, repeats, ours=False)
        found["cred_expire=5, first step"] = first_steps(tuned, repeats, "")
    return {"seconds": found, "missed": missed(found)}


def holds_of(cluster: Cluster, repeats: int, *, ours: bool) -> list[float]:
    """One requeue after another, each on the same node as before."""
    holds = [ft_hold.measure(cluster, NODE, ours=ours)[0] for _ in range(repeats)]
    if any((hold.before, hold.after) != (NODE, NODE) for hold in holds):
        raise AssertionError(f"not on the same node: {holds}")
    return [hold.wait_s for hold in holds]


def first_steps(cluster: Cluster, repeats: int, directive: str) -> list[float]:
    """From the end of an attempt to the first step of the next one, of jobs of two ranks."""
    desk = ft.Desk(cluster)
    options = [word for word in directive.removeprefix("#SBATCH ").split() if word]
    # As the directive says it, the GPUs are those that the job asks for.
    options = [w.replace("--ft-gpus=1", f"--ft-gpus={RANKS}") for w in options]
    waits = []
    for index in range(repeats):
        job = desk.submit(
            f"bench-{index}", TRAIN, f"-n{RANKS}", "--gpus-per-task=1", f"-w{NODE}", *options
        )
        job.wait_step(5, limit_s=120)
        cluster.exec(["scancel", "--signal=USR2", str(job.id)], user="alice")
        job.wait_step(1, attempt=1, limit_s=240)
        job.assert_completed()
        ended_s = job.attempts()[0].ended_s
        if ended_s is None:
            raise AssertionError(f"no end of attempt 0: {job.attempts()}\n{job.output()}")
        waits.append(next(r["at"] for r in job.log() if r["attempt"] == 1) - ended_s)
    return waits


def missed(found: dict[str, list[float]]) -> list[str]:
    """Which targets were not met."""
    ours = statistics.median(found["daemon"])
    default = found.get("default, waited for", found["default, announced"])[0]
    tuned = statistics.median(found["cred_expire=5"])
    misses = []
    if default < WANTED_RATIO * ours:
        misses.append(f"{ours:.1f} s is not {WANTED_RATIO:g} times sooner than {default:.1f} s")
    if ours > tuned:
        misses.append(f"{ours:.1f} s is later than {tuned:.1f} s with cred_expire=5")
    return misses


def table(result: dict[str, Any]) -> str:
    """The rows as text."""
    rows = [f"{'from the end of an attempt to the next one':44}  median     min     max  n"]
    for name, values in result["seconds"].items():
        rows.append(
            f"{name:44} {statistics.median(values):6.1f}s {min(values):6.1f}s {max(values):6.1f}s"
            f" {len(values):2}"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
