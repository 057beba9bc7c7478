"""The daemon's loop: cycles in a thread, signals and the service manager beside them.

A cycle begins every ``cycle_s``; one that takes longer is followed at once by the next, never by
two. SIGTERM and SIGINT end the loop after the cycle in progress (whose commands all have limits), a
second one at once; SIGHUP reads the configuration again between two cycles, and a bad one leaves
the old in force. This is the only place that catches every exception: a cycle that failed is
logged with its traceback, counted, and the next one goes on from what the cluster shows. Nor does
a configuration end a daemon, whatever is in it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from typing import Any

from slurm_ext.control.config import Config
from slurm_ext.control.cycle import Engine, Report
from slurm_ext.control.notify import Notifier
from slurm_ext.domain.errors import SlurmExtError

_log = logging.getLogger(__name__)
# After errors of ours the next cycles come later: a broken daemon must not burden slurmctld.
_BACKOFF = (1, 2, 4, 8)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Loop:
    """Runs an engine until it is told to stop."""

    def __init__(
        self,
        engine: Engine,
        notifier: Notifier,
        reload: Callable[[], Config],
        *,
        applied: Callable[[Config], None] = lambda config: None,
    ) -> None:
        """``reload`` reads the configuration; ``applied`` is told when a new one is in force."""
        self._engine = engine
        self._notifier = notifier
        self._reload = reload
        self._applied = applied
        self._stopping = asyncio.Event()
        self._hangup = asyncio.Event()
        self._wake = asyncio.Event()
        self._failures = 0
        self._metrics_server: Any = None

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self.hangup)
        self._serve_metrics(self._engine.config)
        first = True
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                report = await self._cycle()
                status = "the last cycle failed" if report is None else report.in_words()
                if first and report is not None:
                    # Ready even when Slurm is away: the daemon waits for it, and says so.
                    self._notifier.ready(status)
                    first = False
                self._notifier.watchdog(status)
                if self._hangup.is_set():
                    self._read_again()
                await self._pause(began)
        finally:
            self._notifier.stopping()
            for number in (*_STOP_SIGNALS, signal.SIGHUP):
                loop.remove_signal_handler(number)
            if self._metrics_server is not None:
                self._metrics_server.shutdown()
        _log.info("stopped; what is ours stays until its leases end or slurm-ext release")

    def stop(self) -> None:
        """Stop after the cycle in progress."""
        if self._stopping.is_set():
            _log.warning("told to stop twice: stopping now")
            raise SystemExit(1)
        self._stopping.set()
        self._wake.set()

    def hangup(self) -> None:
        """Read the configuration again after the cycle in progress."""
        self._hangup.set()
        self._wake.set()

    async def _cycle(self) -> Report | None:
        try:
            report = await asyncio.to_thread(self._engine.cycle)
        except Exception:
            self._failures += 1
            self._engine.metrics.errors.inc()
            self._engine.metrics.cycles.labels("failed").inc()
            _log.exception("a cycle failed; the next one starts from what the cluster shows")
            return None
        self._failures = 0
        _log.debug("%s", report.in_words())
        return report

    async def _pause(self, began: float) -> None:
        """Wait for the next cycle, or for a signal."""
        factor = _BACKOFF[min(self._failures, len(_BACKOFF) - 1)]
        left = began + self._engine.config.cycle_s * factor - time.monotonic()
        if left > 0 and not self._stopping.is_set():
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                return
        self._wake.clear()

    def _read_again(self) -> None:
        self._hangup.clear()
        self._notifier.reloading()
        try:
            config = self._reload()
            # First what can fail, so that the old configuration is still whole then.
            if config.metrics_listen != self._engine.config.metrics_listen:
                self._serve_metrics(config)
            self._engine.reconfigure(config)
            self._applied(config)
        except SlurmExtError as exc:
            _log.error("configuration not taken over, the old one stays in force: %s", exc)
        except Exception:
            self._engine.metrics.errors.inc()
            _log.exception("the configuration could not be taken over")
        else:
            _log.info("configuration read again")
        self._notifier.ready("configuration read again")

    def _serve_metrics(self, config: Config) -> None:
        before, listen = self._metrics_server, config.metrics_listen
        self._metrics_server = self._engine.metrics.serve(listen) if listen else None
        if before is not None:
            before.shutdown()
