"""The fixed texts of the corpus, one TOML file per subject."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def load_text(name: str) -> dict[str, Any]:
    """The contents of `<name>.toml` in this folder."""
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))
