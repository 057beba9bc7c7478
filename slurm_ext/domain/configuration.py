"""How a job would train: the configuration, and the candidate that the optimizer chooses from."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_ext.domain.estimate import Estimate


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to run a job.

    ``placement`` lists the GPUs used on each node in descending order, e.g. ``(4, 4)``; its sum is
    ``gpus``. ``local_batch`` is samples per GPU and micro-batch, ``accumulation`` the number of
    micro-batches per optimizer step; ``local_batch * gpus * accumulation`` is the global batch,
    which stays constant over GPU counts. ``stages`` and ``micro_batches`` describe pipeline
    parallelism (1 and 1 = none).
    """

    gpus: int
    placement: tuple[int, ...]
    local_batch: int = 0
    accumulation: int = 1
    precision: str = "fp32"
    grad_checkpointing: bool = False
    frozen: str = "none"
    stages: int = 1
    micro_batches: int = 1

    @property
    def nodes(self) -> int:
        """Number of nodes used."""
        return len(self.placement)

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all GPUs."""
        return self.local_batch * self.gpus * self.accumulation


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job (later: a merged set of jobs) in one configuration.

    ``remaining_s`` estimates the seconds that the remaining work takes in this configuration;
    ``throughput`` is in samples per second, or ``None`` where only a duration is known.
    ``carrier`` is the job that runs; ``job_ids`` are all jobs served by it (carrier first), so
    that a merge candidate is the same type with more than one id.
    """

    job_ids: tuple[str, ...]
    configuration: Configuration
    remaining_s: Estimate
    throughput: Estimate | None = None

    @property
    def carrier(self) -> str:
        """The job whose allocation is used."""
        return self.job_ids[0]

    @property
    def gpus(self) -> int:
        """GPUs of the configuration."""
        return self.configuration.gpus
