"""Errors that every rank raises in the same words, because the ranks agreed on them. No torch.

Each rank fails by them, and one line of them is enough. What a rank finds by itself is not marked:
rank 0 may know nothing of it, so whoever has it says it.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_ext.domain.errors import SlurmExtError

# A note, which a traceback shows too.
_NOTE = "the same on all ranks"


def on_all_ranks(error: SlurmExtError) -> SlurmExtError:
    """Mark an error as one that all ranks raise."""
    error.add_note(_NOTE)
    return error


def says(error: SlurmExtError, environ: Mapping[str, str]) -> bool:
    """Whether this rank is the one to print an error."""
    shared = _NOTE in getattr(error, "__notes__", ())
    return not shared or environ.get("RANK", "0") == "0"
