"""Prometheus metrics of the daemon, in a registry of their own.

Values only: what they are measured from is the loop's business. The HTTP server is started on
demand, since a daemon that serves nothing should open no port.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from slurm_ext.domain.errors import ConfigError

# From the end of an attempt to the first step of the next: the best case, Slurm's delay, worse.
_RECOVERY = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 300.0, 600.0, 1800.0)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """All metrics of one daemon."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        here: dict[str, Any] = {"registry": self.registry, "namespace": "slurm_ext"}
        self.cycle_seconds = Histogram(
            "cycle_seconds", "Time of one whole cycle", buckets=_SECONDS, **here
        )
        self.stage_seconds = Histogram(
            "stage_seconds", "Time of one stage of a cycle", ["stage"], buckets=_SECONDS, **here
        )
        self.cycles = Counter("cycles", "Cycles by outcome", ["outcome"], **here)
        self.skipped = Counter("skipped_cycles", "Cycles skipped, by reason", ["reason"], **here)
        self.writes = Counter(
            "writes", "Job updates by kind and outcome", ["kind", "outcome"], **here
        )
        self.refusals = Counter(
            "refusals",
            "What was not done to a job, by reason (counted when it changes)",
            ["reason"],
            **here,
        )
        self.errors = Counter("errors", "Cycles that ended in an error of ours", **here)
        self.plan_time = Gauge("plan_timestamp_seconds", "Time of the last plan", **here)
        self.jobs = Gauge("jobs", "Pending jobs of the last plan, by verdict", ["verdict"], **here)
        self.leased = Gauge("leased_jobs", "Jobs whose earliest start is ours", **here)
        self.gpus_free = Gauge("pool_free_gpus", "Free GPUs of a pool", ["pool"], **here)
        self.journal_rows = Gauge("journal_rows", "Rows of history", **here)
        self.restarts = Counter("restarts", "Requeued jobs, by cause", ["cause"], **here)
        self.resumed = Counter(
            "resumes_lifted",
            "Requeued jobs that were let go; those that were not are refusals",
            **here,
        )
        self.cooling = Gauge("cooling_jobs", "Requeued jobs that cool down", **here)
        self.recovery_seconds = Histogram(
            "recovery_seconds",
            "From the end of an attempt to the first step of the next one",
            buckets=_RECOVERY,
            **here,
        )
        self.lost_gpu_seconds = Counter(
            "lost_gpu_seconds",
            "GPU time of steps that no checkpoint held when their attempt ended, by cause",
            ["cause"],
            **here,
        )
        self.attempt_gpu_seconds = Counter(
            "attempt_gpu_seconds", "GPU time of ended attempts that kept a record", **here
        )
        self.checkpoint_gpu_seconds = Counter(
            "checkpoint_gpu_seconds",
            "GPU time in which training stood still for saves, in ended attempts",
            **here,
        )
        self.checkpoint_share = Gauge(
            "checkpoint_share",
            "Share of the GPU time of running attempts that stood still for saves",
            **here,
        )
        self.calibration = Gauge(
            "calibration_factor",
            "What the throughput table of a model is multiplied by",
            ["model", "gpu_type"],
            **here,
        )
        self.stale_rows = Gauge(
            "stale_table_rows", "Configurations of the table to be measured again", **here
        )
        self.moves = Counter(
            "moves", "Running jobs asked to make room for another, by outcome", ["outcome"], **here
        )
        self.rebuilt = Counter("journal_rebuilds", "Journals that were begun anew", **here)

    def serve(self, listen: str) -> Any:
        """Serve HTTP on ``ADDRESS:PORT``; returns the server, which `shutdown` ends."""
        host, _, port = listen.rpartition(":")
        try:
            server, _ = start_http_server(int(port), host.strip("[]"), registry=self.registry)
        except OSError as exc:
            raise ConfigError(
                f"metrics_listen={listen!r}", f"cannot listen: {exc}", "choose a free port"
            ) from exc
        return server
