"""Children that the program forks: what the session hears is not for them, nor may it kill them.

Slurm signals every process of a step, data loaders as well, and a trainer whose loader was killed
fails before it has saved. Two kinds of children:

- any fork goes back to what the program had installed, and ignores our signals other than TERM;
- a worker of multiprocessing (a data loader, a pool) also outlives a TERM, unless its parent sent
  it: that is how pools end their workers. Who sent a signal only a waiting thread can tell, so TERM
  is blocked there and waited for.

A worker started by spawn or forkserver begins as a new program, which nothing of this reaches.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurm_ft.session.signals import SignalWatch

_watching: SignalWatch | None = None
_hooked = False


def protect(watch: SignalWatch) -> None:
    """Let the children of this process be treated as described, from now on."""
    from multiprocessing import util

    global _watching, _hooked
    _watching = watch
    # Kept by a weak reference: it ends with the watch.
    util.register_after_fork(watch, _in_worker)
    if not _hooked:
        # A fork hook cannot be taken back, so there is one, and it looks at who is watching now.
        _hooked = True
        os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    if _watching is not None:
        _watching.leave_to_parent()


def _in_worker(watch: SignalWatch) -> None:
    if watch is not _watching or not watch.left or signal.SIGTERM not in watch.numbers:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    thread = threading.Thread(
        target=_outlive, args=(os.getppid(),), name="slurm-ft-worker", daemon=True
    )
    thread.start()


def _outlive(parent: int) -> None:
    """End by a TERM of the parent, and by none else."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    # As if it had not been blocked: whatever the worker has installed meanwhile decides.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)
