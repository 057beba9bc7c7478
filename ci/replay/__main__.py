"""``python -m ci.replay``: start the clusters, replay side by side, print one table. See README.md.

The main thread starts and removes the clusters, so that Ctrl-C at any moment leaves nothing behind;
each variant replays in a thread of its own, which only waits for its container most of the time.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence

from docker.errors import DockerException

from ci.cluster import ClusterError
from ci.replay import ideal, report
from ci.replay.ideal import GPUS_PER_NODE
from ci.replay.jobs import ReplayJob, compress
from ci.replay.options import Options, parse
from ci.replay.progress import Display
from ci.replay.records import ReplayFailedError, as_rows
from ci.replay.stage import Stage
from slurm_ext.domain.errors import SlurmExtError
from slurm_ext.sim import gantt
from slurm_ext.sim.library import find_workload, starter_truth
from slurm_ext.sim.workload import read_workload

# A replay that takes this many times longer than the slowest ideal one has a job that never ends.
_PATIENCE = 2.0
_SLACK_S = 180.0
_POLL_S = 1.0
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: all jobs accounted for and nothing missed; 1: not so; 130: interrupted."""
    options = parse(argv)
    try:
        return _replay(options)
    except (SlurmExtError, ClusterError, DockerException) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything that was started is removed", file=sys.stderr)
        return INTERRUPTED


def _say(text: str) -> None:
    print(f"== {text}", file=sys.stderr, flush=True)


def _replay(options: Options) -> int:
    truth = starter_truth()
    workload = read_workload(find_workload(options.workload), options.jobs)
    simulated = ideal.real_jobs(workload, truth, options.nodes, options.seed)
    jobs = compress(workload, simulated, options.scale, GPUS_PER_NODE)
    ideals = [
        maker(workload, truth, options.nodes, options.seed) for maker in (ideal.easy, ideal.titan)
    ]
    longest_s = max(found.metrics.makespan_s for found in ideals) / options.scale
    _say(
        f"{options.workload}: {len(jobs)} jobs, {options.nodes} nodes x {GPUS_PER_NODE} GPUs, "
        f"1 s = {options.scale:g} s of the workload, hidden errors from seed {options.seed}; "
        f"about {longest_s / 60:.0f} min"
    )
    if not options.full:
        _say("a demonstration, no benchmark (that is --full)")
    stages = [
        Stage(
            variant,
            jobs,
            options.nodes,
            options.scale,
            limit_s=_PATIENCE * longest_s + _SLACK_S,
            keep=options.keep,
        )
        for variant in options.variants
    ]
    with _removed_at_the_end(stages, options.keep):
        for stage in stages:
            stage.start_cluster(_say)
        for stage in stages:
            stage.begin()
        _watch(stages, jobs, longest_s)
        finished = [stage.finished for stage in stages if stage.finished is not None]
    found = report.make(options, finished, ideals)
    print(report.table(found))
    print(report.verdict(found))
    _write(options, found, stages)
    return 0 if found.passed else 1


@contextlib.contextmanager
def _removed_at_the_end(stages: Sequence[Stage], keep: bool) -> Iterator[None]:
    """Remove the clusters; with --keep only after an interrupt, since a failure is to be seen."""
    try:
        yield
    except KeyboardInterrupt:
        keep = False
        raise
    finally:
        for stage in stages:
            if not keep:
                stage.stop()
            elif stage.cluster_name:
                _say(
                    f"{stage.variant} stays up: ci/slurm enter {stage.cluster_name} "
                    f"-u alice; remove it: ci/slurm down {stage.cluster_name}"
                )
        if keep:
            _say(
                "in there time is compressed, and the throughput table with it: for trying things"
                " out at real speed use ci/slurm up --product"
            )


def _watch(stages: Sequence[Stage], jobs: Sequence[ReplayJob], longest_s: float) -> None:
    """Show progress until every variant is done; the first that fails ends all."""
    display = Display(len(jobs), max(job.arrives_s for job in jobs), longest_s)
    while True:
        running = [stage for stage in stages if stage.alive]
        display.show({stage.variant: stage.progress() for stage in stages}, time.time())
        for stage in stages:
            if stage.error is not None:
                display.close()
                if isinstance(stage.error, SlurmExtError | ClusterError | DockerException):
                    raise ReplayFailedError(f"{stage.variant}: {stage.error}") from stage.error
                raise stage.error
        if not running:
            display.close()
            return
        time.sleep(_POLL_S)


def _write(options: Options, found: report.Report, stages: Sequence[Stage]) -> None:
    nodes = {f"n{index}": GPUS_PER_NODE for index in range(1, options.nodes + 1)}
    schedules = {
        stage.variant.words: [record.run for record in stage.finished.records]
        for stage in stages
        if stage.finished is not None
    }
    title = f"{options.workload}, {options.nodes} x {GPUS_PER_NODE} GPUs, seed {options.seed}"
    if not options.full:
        title += " (a demonstration, no benchmark)"
    gantt.draw(schedules, nodes, options.gantt, title)
    _say(f"picture of the schedules: {options.gantt}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps(report.as_json(found), indent=1) + "\n", encoding="utf-8"
        )
        _say(f"results: {options.json}")
    if options.records:
        options.records.parent.mkdir(parents=True, exist_ok=True)
        options.records.write_text(_records(options, stages), encoding="utf-8")
        _say(f"records: {options.records}")


def _records(options: Options, stages: Sequence[Stage]) -> str:
    """What `tests.bench.real_vs_sim` reads: how it was made, then one job a line."""
    head = {
        "workload": options.workload,
        "jobs": options.jobs,
        "nodes": options.nodes,
        "gpus_per_node": GPUS_PER_NODE,
        "time_scale": options.scale,
        "seed": options.seed,
    }
    lines = [f'"meta": {json.dumps(head)}']
    for stage in stages:
        if stage.finished is not None:
            rows = ",\n".join(json.dumps(row) for row in as_rows(stage.finished.records))
            lines.append(f'"{stage.variant}": [\n{rows}\n]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
