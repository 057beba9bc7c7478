"""Telling systemd how the daemon does: the whole sd_notify protocol that we need.

A datagram to the socket that ``NOTIFY_SOCKET`` names; a daemon that systemd did not start says
nothing. Own lines instead of a dependency: the protocol is one send.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Sends state to the service manager, and knows how often it wants to hear from us."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._address = environ.get("NOTIFY_SOCKET", "")
        usec = environ.get("WATCHDOG_USEC", "")
        pid = environ.get("WATCHDOG_PID", "")
        ours = not pid or pid == str(os.getpid())
        self.watchdog_s = int(usec) / 1e6 if usec.isdigit() and ours else None

    def send(self, *lines: str) -> None:
        """Send assignments such as ``READY=1``. A manager that does not listen is no error."""
        if not self._address:
            return
        # "@" stands for the zero byte of an abstract address.
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            try:
                sender.sendto("\n".join(lines).encode(), address)
            except OSError:
                return

    def ready(self, status: str) -> None:
        """The first cycle is over, or a reload is."""
        self.send("READY=1", f"STATUS={status}")

    def watchdog(self, status: str) -> None:
        """A cycle has ended, well or with a source missing: the loop is alive."""
        self.send("WATCHDOG=1", f"STATUS={status}")

    def reloading(self) -> None:
        """The configuration is being read again."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The daemon ends on purpose."""
        self.send("STOPPING=1")
