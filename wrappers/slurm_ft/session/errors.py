"""What can go wrong with a session, as errors of their own."""

from __future__ import annotations

from slurm_ext.domain.errors import SlurmExtError


class SessionError(SlurmExtError):
    """A session cannot be opened, or is used in a way that cannot work."""
