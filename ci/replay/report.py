"""Verdict, table and JSON of a replay. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ci.replay.ideal import GPUS_PER_NODE, Ideal
from ci.replay.options import DEFAULT_WORKLOAD, Options, Variant
from ci.replay.records import Record
from ci.replay.stage import Finished
from slurm_ext.sim.metrics import Metrics, measure, outcomes_of, ratios

# A plain run this far from the ideal EASY replay says more about the machine than about Slurm.
VALID_WITHIN = 0.10
# What the benchmark has to reach on its own workload (average JCT, plain / slurm_ext).
TARGET_AVG_RATIO = 1.7
# A submission later than this (real seconds) means that the machine could not keep up; jobs that
# arrive at one instant are submitted one after the other, which takes a second for twenty.
LAG_LIMIT_S = 3.0


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement and whether it is met; ``value`` in words."""

    name: str
    passed: bool
    value: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is printed and written."""

    options: Options
    metrics: Mapping[Variant, Metrics]
    ideals: tuple[Ideal, ...]
    baseline: str
    ratio: Mapping[Variant, Mapping[str, float | None]]
    checks: tuple[Check, ...]
    valid: bool | None
    details: Mapping[Variant, Mapping[str, Any]]

    @property
    def passed(self) -> bool:
        """Whether everything that was required is met."""
        return self.valid is not False and all(check.passed for check in self.checks)


def make(options: Options, finished: Sequence[Finished], ideals: Sequence[Ideal]) -> Report:
    """The report; ``ideals`` begins with the ideal EASY replay."""
    gpus = options.nodes * GPUS_PER_NODE
    outcomes = {
        item.variant: outcomes_of(record.run for record in item.records) for item in finished
    }
    plain = outcomes.get(Variant.PLAIN)
    metrics = {variant: measure(found, gpus, plain) for variant, found in outcomes.items()}
    baseline, name = _baseline(metrics.get(Variant.PLAIN), ideals[0])
    valid = _valid(metrics.get(Variant.PLAIN), ideals[0])
    ratio: dict[Variant, Mapping[str, float | None]] = {
        variant: ratios(baseline, found)
        for variant, found in metrics.items()
        if variant is not Variant.PLAIN
    }
    checks = [
        Check(
            f"{item.variant}: submissions on time",
            item.lag_s <= LAG_LIMIT_S,
            f"latest {item.lag_s:.2f} s late, at most {LAG_LIMIT_S:g} s allowed",
        )
        for item in finished
    ]
    if options.full and options.workload == DEFAULT_WORKLOAD:
        checks += _targets(metrics, ratio)
    return Report(
        options=options,
        metrics=metrics,
        ideals=tuple(ideals),
        baseline=name,
        ratio=ratio,
        checks=tuple(checks),
        valid=valid,
        details={item.variant: _details(item) for item in finished},
    )


def _baseline(plain: Metrics | None, ideal: Ideal) -> tuple[Metrics, str]:
    """What ratios are against: the better of the plain run and the ideal EASY replay."""
    if plain is not None and plain.avg_jct_s <= ideal.metrics.avg_jct_s:
        return plain, "the plain run"
    return ideal.metrics, "the ideal EASY replay"


def _valid(plain: Metrics | None, ideal: Ideal) -> bool | None:
    if plain is None:
        return None
    return abs(plain.avg_jct_s / ideal.metrics.avg_jct_s - 1) <= VALID_WITHIN


def _targets(
    metrics: Mapping[Variant, Metrics], ratio: Mapping[Variant, Mapping[str, float | None]]
) -> list[Check]:
    if Variant.FULL not in metrics or Variant.PLAIN not in metrics:
        return []
    ours, plain = metrics[Variant.FULL], metrics[Variant.PLAIN]
    found = ratio[Variant.FULL]["avg_jct_s"] or 0.0
    return [
        Check(
            "average JCT, plain / slurm_ext",
            found >= TARGET_AVG_RATIO,
            f"{found:.2f}, at least {TARGET_AVG_RATIO} wanted",
        ),
        Check(
            "p99 JCT not worse than plain",
            ours.p99_jct_s <= plain.p99_jct_s,
            f"{_hours(ours.p99_jct_s)} h against {_hours(plain.p99_jct_s)} h",
        ),
        Check(
            "makespan not worse than plain",
            ours.makespan_s <= plain.makespan_s,
            f"{_hours(ours.makespan_s)} h against {_hours(plain.makespan_s)} h",
        ),
    ]


def _details(item: Finished) -> dict[str, Any]:
    records = item.records
    return {
        "jobs": len(records),
        "resized": sum(record.run.gpus != record.requested_gpus for record in records),
        "scattered": sum(record.scattered for record in records),
        "gpu_counts": _counts(records),
        "largest_submission_lag_s": item.lag_s,
        "cluster": item.cluster,
    }


def _counts(records: Sequence[Record]) -> dict[str, int]:
    counts: dict[int, int] = {}
    for record in records:
        counts[record.run.gpus] = counts.get(record.run.gpus, 0) + 1
    return {str(gpus): counts[gpus] for gpus in sorted(counts)}


def as_json(report: Report) -> dict[str, Any]:
    """The document of --json: the variants, the ratios of slurm_ext, and how they were made."""
    options = report.options
    document: dict[str, Any] = {
        str(variant): found.as_dict() for variant, found in report.metrics.items()
    }
    if Variant.FULL in report.ratio:
        document["ratio"] = dict(report.ratio[Variant.FULL])
    document["meta"] = {
        "workload": options.workload,
        "benchmark": options.full,
        "nodes": options.nodes,
        "gpus": options.nodes * GPUS_PER_NODE,
        "time_scale": options.scale,
        "seed": options.seed,
        "valid": report.valid,
        "ratio_against": report.baseline,
        "ratio_order": dict(report.ratio.get(Variant.ORDER, {})),
        "ideal": {ideal.name: ideal.metrics.as_dict() for ideal in report.ideals},
        "checks": [
            {"name": check.name, "passed": check.passed, "value": check.value}
            for check in report.checks
        ],
        "variants": {str(variant): dict(found) for variant, found in report.details.items()},
    }
    return document


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.3f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _factor(value: float) -> str:
    return f"{value:.1f}"


_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("average JCT (h)", "avg_jct_s", _hours),
    ("median JCT (h)", "median_jct_s", _hours),
    ("p95 JCT (h)", "p95_jct_s", _hours),
    ("p99 JCT (h)", "p99_jct_s", _hours),
    ("makespan (h)", "makespan_s", _hours),
    ("worst slowdown", "max_slowdown", _factor),
    ("jobs hurt by > 10 %", "share_hurt_10pct", _share),
    ("queue share of JCT", "queue_share_of_jct", _share),
    ("GPU utilisation", "gpu_utilisation", _share),
)


_LABEL_WIDTH, _WIDTH = 20, 11


def table(report: Report) -> str:
    """The table for people: measured, ratios, and the ideal replays as a yardstick."""
    blocks: list[tuple[str, list[tuple[str, Callable[[str], str]]]]] = [
        ("measured", [(str(v), _cells(found)) for v, found in report.metrics.items()]),
        ("ratio", [(str(v), _ratio_cells(found)) for v, found in report.ratio.items()]),
        # An ideal replay is compared with nothing: nobody can be hurt in it.
        ("ideal", [(i.name, _cells(i.metrics, without="share_hurt_10pct")) for i in report.ideals]),
    ]
    blocks = [(head, columns) for head, columns in blocks if columns]
    lines = [" " * _LABEL_WIDTH, " " * _LABEL_WIDTH]
    for head, columns in blocks:
        width = _WIDTH * len(columns)
        lines[0] += " | " + f"{head:^{width}}"
        lines[1] += " | " + "".join(f"{name:>{_WIDTH}}" for name, _ in columns)
    for label, name, _ in _ROWS:
        cells = ["".join(f"{cell(name):>{_WIDTH}}" for _, cell in columns) for _, columns in blocks]
        lines.append(" | ".join([f"{label:{_LABEL_WIDTH}}", *cells]))
    return "\n".join(line.rstrip() for line in lines)


def _cells(found: Metrics, without: str = "") -> Callable[[str], str]:
    values = found.as_dict()
    shown = {name: show for _, name, show in _ROWS}
    return lambda name: "" if name == without else shown[name](values[name])


def _ratio_cells(found: Mapping[str, float | None]) -> Callable[[str], str]:
    return lambda name: _ratio(found[name])


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def verdict(report: Report) -> str:
    """The lines below the table."""
    options = report.options
    lines = [
        "Times are hours of the workload. Ratios are against the better of the plain run and the "
        f"ideal EASY replay, here {report.baseline}; above 1 is better."
    ]
    for variant, found in report.details.items():
        counts = ", ".join(f"{gpus}: {jobs}" for gpus, jobs in found["gpu_counts"].items())
        note = f", {found['scattered']} on more nodes than needed" if found["scattered"] else ""
        lines.append(
            f"{variant}: {found['jobs']} jobs, {found['resized']} on another GPU count than asked "
            f"(GPUs: jobs = {counts}){note}"
        )
    if report.valid is not None:
        measured = report.metrics[Variant.PLAIN].avg_jct_s
        off = measured / report.ideals[0].metrics.avg_jct_s - 1
        words = "valid" if report.valid else "INVALID"
        lines.append(
            f"{words}: plain Slurm's average JCT is {off:+.1%} off the ideal EASY replay "
            f"(at most {VALID_WITHIN:.0%} allowed)"
        )
    for check in report.checks:
        lines.append(f"{'pass' if check.passed else 'MISS'}: {check.name}: {check.value}")
    if not options.full:
        lines.append(
            "This is a demonstration on the first jobs of the workload and no benchmark: "
            "use --full for numbers."
        )
    return "\n".join(lines)
