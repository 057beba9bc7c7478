"""Log lines of the daemon: one JSON object per line on stdout, which journald keeps.

What a record carries as ``extra={"data": {...}}`` becomes keys of the object, so that
``journalctl -o cat -u slurm-ext | jq 'select(.job == "123")'`` works.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import IO, Any


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, message, the record's data, and a traceback where there is one."""
        line: dict[str, Any] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "from": record.name.removeprefix("slurm_ext."),
            "message": record.getMessage(),
        }
        data = getattr(record, "data", None)
        if isinstance(data, dict):
            line.update(data)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup_logging(level: str, stream: IO[str] | None = None) -> None:
    """Send the product's records to ``stream`` (stdout) from ``level`` on; again after a reload."""
    logger = logging.getLogger("slurm_ext")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
