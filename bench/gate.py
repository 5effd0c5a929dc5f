"""Whether figures may be taken at all: a wrong server is quickly a fast one."""

from __future__ import annotations

import json

from bench.report import REPOSITORY


def reason_to_refuse() -> str:
    """Why nothing may be measured now; empty if nothing speaks against it.

    The hook for whatever `make test` leaves behind. For now that is pytest's own list of the tests that failed last.
    """
    failed = REPOSITORY / ".pytest_cache" / "v" / "cache" / "lastfailed"
    if not failed.is_file():
        return ""
    names = list(json.loads(failed.read_text(encoding="utf-8")))
    return f"{len(names)} tests failed when they were last run, {names[0]} among them: run `make test`" if names else ""
