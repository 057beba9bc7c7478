"""Frameworks that requeue a job by themselves, so that it is not requeued twice.

Looked at when the program has ended, and only where it had no session of ours. A framework that is
imported further down than the script that was started is not seen here; then the record tells, in
which the job is in the queue again already.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

_MOST_BYTES = 1 << 18
_LIGHTNING = re.compile(
    rb"^\s*(?:import|from)\s+(?:lightning|pytorch_lightning|lightning_fabric)\b", re.MULTILINE
)
# Lightning's own switches for it.
_LIGHTNING_OFF = re.compile(rb"auto_requeue\s*=\s*False|LightningEnvironment\(")


def requeues_by_itself(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Name of such a framework in the program, empty where none is seen."""
    if any(word.startswith("submitit.") for word in command) or any(
        name.startswith("SUBMITIT_") for name in environment
    ):
        return "submitit"
    for word in command:
        if word.endswith(".py") and os.path.isfile(word):
            try:
                with open(word, "rb") as file:
                    text = file.read(_MOST_BYTES)
            except OSError:
                return ""
            if _LIGHTNING.search(text) and not _LIGHTNING_OFF.search(text):
                return "Lightning"
            return ""
    return ""
