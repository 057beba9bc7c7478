"""Waiting for blocked signals with a limit.

Not by `signal.sigtimedwait`: where the process was stopped (scontrol suspend, SIGSTOP) beyond the
limit, CPython returns what happened to lie on its stack as if that were a signal (seen with 3.11
and 3.13: garbage, or the signal before once more). A timer of the kernel that is waited for like
every other signal has no such case.
"""

from __future__ import annotations

import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# siginfo's si_code of what the kernel sends, such as INT from a terminal, and this timer's ALRM.
FROM_KERNEL = 0x80


def wait_signal(waited: Iterable[int], limit_s: float) -> signal.struct_siginfo | None:
    """The next of the signals, or ``None`` at the limit.

    All of them must be blocked, and ALRM as well, in every thread.
    """
    if limit_s <= 0:
        # Never sleeps, so it cannot be interrupted.
        return signal.sigtimedwait(waited, 0)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        info = signal.sigwaitinfo({*waited, signal.SIGALRM})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    if info.si_signo == signal.SIGALRM and info.si_code == FROM_KERNEL:
        return None
    return info
