"""Whether an exception of the program means that a peer is gone. Pure.

A collective of the program fails with one of torch's errors when a peer dies or hangs. For the job
that is no error of the user: it goes back to its last checkpoint. Torch has a type for such an
error since 2.0, which gloo does not use for all of them: hence the words as well.
"""

from __future__ import annotations

from slurm_ft.comm import ExchangeLostError

_TYPES = frozenset({"DistNetworkError", "DistStoreError"})
_RAISED_BY_TORCH = frozenset({"RuntimeError", "DistBackendError", "DistError"})
_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "application timeout caused pair closure",
    "operation timed out",
    "remote process exited",
    "socket timeout",
    "nccl communicator was aborted",
    "watchdog caught collective operation timeout",
)


def lost_peer(exc: BaseException) -> bool:
    """Whether a peer is the reason, as far as the exception tells."""
    if isinstance(exc, ExchangeLostError):
        return True
    name = type(exc).__name__
    if name in _TYPES:
        return True
    # Only what torch itself raises: a user's own TimeoutError on a download is none of these.
    text = str(exc).lower()
    return name in _RAISED_BY_TORCH and any(word in text for word in _WORDS)
