"""A spool with documents, and the command line run on it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from slurm_ext.cli.main import main
from slurm_ext.control.spool import Spool
from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.document import ClusterDocument, Mode, PlanDocument
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.plan import Decision, SolveInfo, Term, Verdict
from slurm_ext.domain.policy import Permit

MADE_S = time.time()


def estimate(value: float, source: Source = Source.MEASURED, note: str = "") -> Estimate:
    """Ten percent either way."""
    return Estimate(value, value * 0.9, value * 1.1, source, note)


def candidate(gpus: int, seconds: float, job_id: str = "7") -> Candidate:
    """Four GPUs a node, global batch 256."""
    full, rest = divmod(gpus, 4)
    placement = (4,) * full + ((rest,) if rest else ())
    return Candidate(
        (job_id,),
        Configuration(gpus, placement, local_batch=256 // gpus),
        estimate(seconds),
        estimate(256 / seconds),
    )


def decision(verdict: Verdict = Verdict.WAIT, **fields: Any) -> Decision:
    """A decision for job 7; it waits unless told otherwise."""
    chosen = candidate(2, 1800)
    values: dict[str, Any] = {
        "job_id": "7",
        "verdict": verdict,
        "rank": 0,
        "reason": "its GPU count is decided when GPUs become free",
        "configuration": chosen.configuration,
        "remaining_s": chosen.remaining_s,
        "terms": (Term("small", 0.1, "hardly matters"), Term("large", -2.0, "tips the scales")),
        **fields,
    }
    return Decision(**values)


def document(job: int = 7, made: Decision | None = None, **fields: Any) -> PlanDocument:
    """A pending job of this user's that may be resized to 1, 2 or 4 GPUs."""
    values: dict[str, Any] = {
        "job_id": str(job),
        "base_id": job,
        "user": "alice",
        "uid": os.getuid(),
        "partition": "main",
        "qos": "normal",
        "account": "vision",
        "state": "PENDING",
        "slurm_reason": "BeginTime",
        "priority": 1234,
        "made_s": MADE_S,
        "mode": Mode.ACTING,
        "policy": "titan",
        "decision": replace(made or decision(), job_id=str(job)),
        "permit": Permit(resize=True, lease=True, pin=True),
        "requested_gpus": 4,
        "present_gpus": 4,
        "place": 1,
        "places": 1,
        "candidates": (candidate(1, 3600), candidate(2, 1800), candidate(4, 1000)),
        "refused": {"16": "throughput per GPU is 30% of the best", "8": "QOS normal allows 4 GPUs"},
        "ours": LedgerEntry(str(job), MADE_S - 60),
        "solve": SolveInfo("main", "knapsack", True, 0.0, 0.001, 3, 1),
        **fields,
    }
    return PlanDocument(**values)


def whole(made_s: float | None = None, **fields: Any) -> ClusterDocument:
    """A daemon that acts in partition main."""
    values: dict[str, Any] = {
        "mode": Mode.ACTING,
        "policy": "titan",
        "cycle": 3,
        "cycle_s": 5.0,
        "lease_s": 300.0,
        "acting": {"main": ("lease", "order", "pin", "resize")},
        **fields,
    }
    return ClusterDocument(made_s=MADE_S if made_s is None else made_s, **values)


class Site:
    """One spool, one configuration, and commands run in this process."""

    def __init__(self, root: Path, **keys: Any) -> None:
        self.spool = Spool(root / "spool")
        self.spool.prepare()
        self.config = root / "config.yaml"
        values: Mapping[str, Any] = {
            "spool": str(self.spool.root),
            "table": str(root / "table.sqlite"),
            "journal": str(root / "journal.sqlite"),
            **keys,
        }
        self.config.write_text(yaml.safe_dump(dict(values)))

    def write(self, *documents: PlanDocument, daemon: ClusterDocument | None = None) -> None:
        """Put documents into the spool, and the one of a daemon that is at work."""
        self.spool.write_plans(documents)
        self.spool.write_cluster(daemon or whole())

    def run(self, *words: str) -> int:
        """``slurm-ext WORDS``; returns the exit code."""
        return main([*words, "--config", str(self.config)])
