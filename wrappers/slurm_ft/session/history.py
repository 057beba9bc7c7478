"""What the job's earlier attempts tell this one: how often it is hit unannounced."""

from __future__ import annotations

import logging

from slurm_ext.domain.attempt import Attempt, parse_attempts
from slurm_ext.domain.errors import ProtocolError
from slurm_ext.domain.request import ATTEMPTS_PREFIX, SUFFIX
from slurm_ft.session.interval import estimate_mtbf_s
from slurm_ft.session.settings import Settings

_log = logging.getLogger(__name__)


def mtbf_s(settings: Settings) -> float:
    """Mean time between failures: as the user says, else as the job has seen."""
    if settings.mtbf_s is not None:
        return settings.mtbf_s
    return estimate_mtbf_s(settings.nodes, earlier_attempts(settings))


def earlier_attempts(settings: Settings) -> tuple[Attempt, ...]:
    """As ft-run has written them down; none where that cannot be read.

    Missing is as good as none here and only here: it sharpens an estimate that has a prior.
    """
    if settings.state_dir is None:
        return ()
    path = settings.state_dir / f"{ATTEMPTS_PREFIX}{settings.job_id}{SUFFIX}"
    try:
        return parse_attempts(path.read_text(errors="replace"), str(path)).attempts
    except FileNotFoundError:
        return ()
    except (OSError, ProtocolError) as exc:
        _log.info("earlier attempts are not looked at: %s", exc)
        return ()
