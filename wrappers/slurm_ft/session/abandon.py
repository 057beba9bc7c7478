"""The last words of a rank that cannot leave in order, and its end by `os._exit`.

Reached while the main thread may sit in a collective or in a lock for ever, so nothing here waits
without a limit and no lock of the program is taken for good. Communicators of NCCL are aborted
first: a process killed with open ones has taken NVLink, and with it the node, out of service.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

# Together these are well below the reserve that the guard keeps from the grace.
_RECORD_S = 2.0
_ABORT_S = 3.0
_FLUSH_S = 0.5


def abandon(code: int, message: str, record: Callable[[], None]) -> NoReturn:
    """Record, say why, abort what would hang, and end this process with ``code``."""
    # Not through logging or sys.stderr: the main thread may hold their locks.
    with contextlib.suppress(OSError):
        os.write(2, f"slurm_ft: {message}; ending with exit code {code}\n".encode())
    _within(_RECORD_S, record)
    _within(_ABORT_S, lambda: abort_communicators(sys.modules.get("torch")))
    _within(_FLUSH_S, _flush)
    os._exit(code)


def abort_communicators(torch: Any) -> bool:
    """Abort NCCL's communicators where torch has some; whether it was asked to."""
    if torch is None:
        return False
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized() or "nccl" not in dist.get_backend():
        return False
    # Marked experimental by torch: where it is missing, or fails, the end is the same a bit ruder.
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is None:
        return False
    with contextlib.suppress(RuntimeError, ValueError):
        abort()
    return True


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _within(limit_s: float, call: Callable[[], object]) -> None:
    """Run it aside and go on at the limit whatever became of it."""
    thread = threading.Thread(target=call, name="slurm-ft-abandon", daemon=True)
    thread.start()
    thread.join(limit_s)
