"""Virtual environments and build folders: made once, at pinned versions, and marked when they are whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.base import environment

_MARK = "installed.json"


@dataclass(frozen=True, slots=True)
class Installation:
    """A folder with what a recipe makes. The mark is written last: half an installation is none."""

    folder: Path
    recipe: tuple[str, ...]  # versions and options; another recipe means another installation

    @property
    def python(self) -> Path:
        """The interpreter of its virtual environment."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def log(self) -> Path:
        """What the commands said."""
        return self.folder / "install.log"

    def is_whole(self) -> bool:
        """Whether all of this recipe is there."""
        mark = self.folder / _MARK
        return mark.is_file() and json.loads(mark.read_text(encoding="utf-8"))["recipe"] == list(self.recipe)

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Around the commands that install: marks the folder when they have succeeded, with the seconds it took."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / _MARK).unlink(missing_ok=True)
        self.log.write_text("", encoding="utf-8")
        began = time.perf_counter()
        yield
        mark = {"recipe": self.recipe, "seconds": round(time.perf_counter() - began, 1)}
        (self.folder / _MARK).write_text(json.dumps(mark) + "\n", encoding="utf-8")

    def make_environment(self, requirements: Sequence[str]) -> None:
        """A virtual environment with these packages."""
        self.run(sys.executable, "-m", "venv", "--clear", self.folder / "venv")
        self.pip("install", *requirements)

    def pip(self, *arguments: str | Path) -> None:
        """The environment's own pip."""
        self.run(self.python, "-m", "pip", *arguments)

    def run(self, *command: str | Path) -> None:
        """A command, its output to the log. Raises SystemExit if it fails."""
        run_logged(command, self.log, cwd=self.folder)


def run_logged(command: Sequence[str | Path], log: Path, *, cwd: Path) -> None:
    """A command, its output at the end of the log. Raises SystemExit if it fails."""
    with log.open("a", encoding="utf-8") as output:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        raise SystemExit("\n".join([f"failed: {command[0]} ... ({log})", *lines]))


def fingerprint(checkpoint: Path) -> str:
    """Changes when a file of the checkpoint does; its gigabytes are not read."""
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr((str(checkpoint.resolve()), facts)).encode()).hexdigest()[:16]


def unpack_debian(installation: Installation, package: str, pattern: str) -> None:
    """Files of a Debian package into the folder itself, if apt knows the package: the system is not changed."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None or next(installation.folder.glob(pattern), None):
        return
    with contextlib.suppress(SystemExit):  # without it a peer is slower, not broken
        installation.run("apt-get", "download", package)
        for archive in installation.folder.glob(f"{package}*.deb"):
            installation.run("dpkg", "-x", archive, installation.folder / "debian")
            archive.unlink()
