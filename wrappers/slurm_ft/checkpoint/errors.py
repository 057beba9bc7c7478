"""What can go wrong with a checkpoint. No I/O here.

A save that failed leaves the older checkpoints as they were, and is told to every rank: the job may
go on.
"""

from __future__ import annotations

from slurm_ext.domain.errors import SlurmExtError
from slurm_ft.comm import ExchangeLostError


class CheckpointError(SlurmExtError):
    """A checkpoint could not be written, or what is on disk cannot be used."""


class LostPeerError(CheckpointError, ExchangeLostError):
    """A rank was lost while a checkpoint was being saved or loaded; the older ones are intact."""
