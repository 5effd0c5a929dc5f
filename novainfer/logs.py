"""How all processes of a server log, to standard error: lines of text or, with `--log-format json`, an object a line.

A request's id comes with `extra={"request_id": ...}`, what else is known of it with `extra={"fields": {...}}`. Neither
prompts nor answers are logged.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from novainfer.config import ServerConfig


def configure(process: str, config: ServerConfig) -> None:
    """Let this process's loggers speak. process: which one it is, e.g. "gateway 0"."""
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        handler.setFormatter(_JsonLines(process))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s"))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    logging.captureWarnings(True)


class _JsonLines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line: every character that could end it is escaped."""
        line = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
