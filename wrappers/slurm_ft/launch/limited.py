"""Calls to a file system that may hang, with a limit.

A read from a dead file server cannot be interrupted, so it is made in a thread of its own, which
is left behind past the limit. ``_thread`` and not ``threading``: it is what is imported already.
"""

from __future__ import annotations

import _thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")


class LateError(Exception):
    """The call did not end within its limit."""


def within(limit_s: float, call: Callable[[], T]) -> T:
    """What ``call`` returns. Raises LateError past the limit, or the OSError of the call.

    Signals that the loop waits for must be blocked by now: the thread inherits the mask.
    """
    answer: list[T] = []
    failed: list[OSError] = []
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            answer.append(call())
        except OSError as exc:
            failed.append(exc)
        finally:
            done.release()

    _thread.start_new_thread(run, ())
    if not done.acquire(timeout=limit_s):
        raise LateError
    if failed:
        raise failed[0]
    return answer[0]
