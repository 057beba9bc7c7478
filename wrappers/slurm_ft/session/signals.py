"""Hearing the signals that mean "save and come back".

Two things happen at a signal. Python's handler runs when the main thread is next between two
bytecodes, which is not before a collective it sits in has ended; it sets a flag and calls the
handler that was there before. The byte that C writes into the wake-up file descriptor is there at
once: the listener thread (`slurm_ft.session.guard`) reads it and does the talking. Either alone
is enough to be heard.

Only the main thread may install handlers: that is Python's rule. Elsewhere nothing is installed
and the session says so. What the program had installed is put back when the session ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from slurm_ext.domain.errors import ConfigError
from slurm_ft import variables
from slurm_ft.session.children import protect

# USR1 is not among them: a release of NCCL took it for itself.
DEFAULT_SIGNALS: tuple[int, ...] = (signal.SIGUSR2, signal.SIGTERM)
_NOT_FOR_US = frozenset({signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGCHLD})

_log = logging.getLogger(__name__)


def parse_signals(text: str, place: str = variables.SIGNALS) -> tuple[int, ...]:
    """``USR2,TERM`` as numbers, or a ConfigError naming ``place``."""
    numbers = []
    for word in text.split(","):
        name = word.strip().upper().removeprefix("SIG")
        if not name:
            continue
        try:
            number = signal.Signals[f"SIG{name}"]
        except KeyError as exc:
            raise ConfigError(
                place, f"{word.strip()!r} is no signal", "write names as in USR2,TERM"
            ) from exc
        if number in _NOT_FOR_US:
            raise ConfigError(place, f"{name} cannot be used", "write names as in USR2,TERM")
        if number not in numbers:
            numbers.append(number)
    if not numbers:
        raise ConfigError(place, f"{text!r} names no signal", "write names as in USR2,TERM")
    return tuple(numbers)


class SignalWatch:
    """Handlers and the wake-up descriptor, from `install` to `restore`.

    ``noted`` is called in the main thread by the handler, with the number of the signal: it must
    only set flags. `read_end` is for the listener: `take` returns the numbers that came.
    """

    def __init__(self, numbers: tuple[int, ...], noted: Callable[[int], None]) -> None:
        self.numbers = numbers
        self._noted = noted
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1
        self.read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._installed = False
        self.left = False

    def install(self) -> bool:
        """Install the handlers; False (and a warning) where this is not the main thread."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "the session was opened in the thread %s, and Python installs signal handlers in"
                " the main thread only: a signal will not be saved for; open the session in the"
                " main thread",
                threading.current_thread().name,
            )
            return False
        self._previous_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in self.numbers:
            self._previous[number] = signal.signal(number, self._handle)
        self._installed = True
        protect(self)
        return True

    def restore(self) -> None:
        """Put back what was there, except where the program has replaced ours since."""
        if self._installed and threading.current_thread() is threading.main_thread():
            self._put_back()
            current = signal.set_wakeup_fd(self._previous_fd)
            if current != self._write_end:
                signal.set_wakeup_fd(current)
        self._installed = False

    def close(self) -> None:
        """Close the pipe; the listener must have ended."""
        os.close(self.read_end)
        os.close(self._write_end)

    def wake(self) -> None:
        """Make the listener look up; a zero byte is no signal."""
        # A full pipe wakes it as well.
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_end, b"\0")

    def take(self) -> list[int]:
        """Signals of ours that came since the last call, others passed on; for the listener."""
        try:
            data = os.read(self.read_end, 4096)
        except BlockingIOError:
            return []
        if self._previous_fd >= 0:
            # Somebody else, an event loop for instance, was listening before us.
            others = data.replace(b"\0", b"")
            if others:
                with contextlib.suppress(OSError):
                    os.write(self._previous_fd, others)
        return [number for number in data if number in self._previous]

    def leave_to_parent(self) -> None:
        """In a forked child: see `slurm_ft.session.children`."""
        # Signals are the main thread's: in the child that is the one that forked.
        if not self._installed:
            return
        self._installed = False
        self.left = True
        signal.set_wakeup_fd(-1)
        for number, previous in self._previous.items():
            if previous in (signal.SIG_DFL, None) and number != signal.SIGTERM:
                signal.signal(number, signal.SIG_IGN)
        self._put_back()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._noted(number)
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _put_back(self) -> None:
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                # None: it was not installed from Python, and cannot be put back from here.
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
