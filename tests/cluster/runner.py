"""Runs the product's Slurm commands inside a containerized cluster, as the daemon's user."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from ci.cluster import DAEMON_USER, Cluster, CommandError
from ci.cluster.spec import SUITE
from slurm_ext.domain.errors import SlurmCommandError
from slurm_ext.slurm.process import Answer, CommandRunner, slurm_environment


def hears_interrupts() -> None:
    """For a child that is to be interrupted: shells start what runs in the background deaf to it,
    and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def lacks_pmix(cluster: Cluster) -> bool:
    """Whether this Slurm is built without mpi/pmix, as Debian's 26.05 is; the usual suite's has it,
    and a test there that needs it must fail without."""
    listed = cluster.exec(["srun", "--mpi=list"], check=False)
    return cluster.spec.suite != SUITE and "pmix" not in listed.stdout + listed.stderr


class ClusterRunner(CommandRunner):
    """Commands go through the container engine; all else is as on the controller itself."""

    def __init__(self, cluster: Cluster, user: str = DAEMON_USER, timeout_s: float = 30.0) -> None:
        super().__init__(timeout_s)
        self.cluster = cluster
        self.user = user

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float | None = None,
        check: bool = True,
    ) -> Answer:
        limit = timeout_s or self.timeout_s
        try:
            done = self.cluster.exec(
                argv,
                user=self.user,
                check=False,
                timeout=limit,
                stdin=stdin,
                env=slurm_environment({}),
            )
        except CommandError as exc:
            raise SlurmCommandError(argv, None, f"no answer within {limit:g} s") from exc
        if check and done.rc != 0:
            raise SlurmCommandError(argv, done.rc, done.stderr)
        return Answer(done.stdout, done.stderr, done.rc)
