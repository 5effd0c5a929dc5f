"""Several "hosts" on one machine for tests of what runs between hosts: namespaces of network, processes and mounts.

A host has its own interface, loopback, /tmp, /dev/shm and process ids. Everything in it dies with its first process,
which ends when its standard input does: so nothing outlives the test, however that ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

_NETWORK = "10.213.0"
_PATIENCE = 60  # seconds; only a failing test waits that long
# The shell stays to take the orphans of the host away once they have ended.
_FIRST_PROCESS = """
for kept in "$@"; do mkdir -p "$0${kept#/tmp}" && mount --bind "$kept" "$0${kept#/tmp}" || exit; done
mount --rbind "$0" /tmp && mount -t tmpfs -o size=512m tmpfs /dev/shm && ip link set lo up && echo ready && cat
exit
"""
_UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def why_not() -> str | None:
    """What this machine lacks to be two hosts, if anything."""
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


class Host:
    """One of them. Commands run in it with `prefix`; its /tmp is the folder `tmp` here."""

    def __init__(self, tmp: Path, address: str) -> None:
        tmp.mkdir()
        self.tmp, self.address = tmp, address
        self._process = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _FIRST_PROCESS, str(tmp), *kept_folders()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        self.pid = psutil.Process(self._process.pid).children()[0].pid  # of its first process

    @property
    def prefix(self) -> tuple[str, ...]:
        """To be put before a command."""
        return ("nsenter", "--target", str(self.pid), "--net", "--mount", "--pid", "--")

    def run(self, *command: str, environ: dict[str, str] | None = None) -> str:
        """Run a command to its end and return its standard output; an exit status other than 0 is an error."""
        done = subprocess.run(
            [*self.prefix, *command], capture_output=True, text=True, env=environ, timeout=_PATIENCE, check=False
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def holds(self, pid: int) -> bool:
        """Whether a process (by its pid outside) is in this host's network; one that has ended is not."""
        own = os.readlink(f"/proc/{self.pid}/ns/net")
        try:
            return os.readlink(f"/proc/{pid}/ns/net") == own
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            return False

    def close(self) -> None:
        """End the host and everything in it (idempotent)."""
        if self._process.returncode is None:
            self._process.communicate(timeout=_PATIENCE)

    def take_home(self, home: Path) -> Path:
        """Give the host a home directory of its own at `home`; the folder that it is here."""
        mine = self.tmp / "home"
        mine.mkdir()
        for folder in kept_folders(str(home)):
            (mine / Path(folder).relative_to(home)).mkdir(parents=True)
            self.run("mount", "--bind", folder, f"/tmp/home/{Path(folder).relative_to(home)}")
        self.run("mount", "--rbind", "/tmp/home", str(home))
        return mine


def kept_folders(private: str = "/tmp") -> list[str]:
    """What a host shares with us below a folder that is its own: this checkout, the interpreter, compiled kernels."""
    kernels = Path.home() / ".cache" / "novainfer" / "native"
    folders = Path(__file__).resolve().parent.parent, Path(sys.prefix), Path(sys.base_prefix), kernels
    return [str(folder) for folder in dict.fromkeys(folders) if folder.is_relative_to(private) and folder.exists()]


@contextmanager
def hosts_of_one_network(folder: Path, number: int = 2) -> Iterator[tuple[Host, ...]]:
    """Some hosts that hear each other and nobody else; `folder` is where their files lie.

    Each has the others' way out as its default route: Ray asks which one it would use for that to
    find its own address.
    """
    with ExitStack() as stack:
        hosts: list[Host] = []
        for index in range(number):
            hosts.append(Host(folder / f"host-{index}", f"{_NETWORK}.{index + 1}"))
            stack.callback(hosts[-1].close)
        first, *others = hosts
        first.run("ip", "link", "add", "bridge", "type", "bridge")
        _connect(first, "bridge", others[0])
        for index, host in enumerate(others):
            # From the first one's network, but with our process ids, by which the other is named.
            wire = ("type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
            inside_first = ("nsenter", "--target", str(first.pid), "--net")
            subprocess.run([*inside_first, "ip", "link", "add", f"wire{index}", *wire], check=True)
            first.run("ip", "link", "set", f"wire{index}", "master", "bridge", "up")
            _connect(host, "eth0", first)
        yield tuple(hosts)


def _connect(host: Host, device: str, router: Host) -> None:
    host.run("ip", "address", "add", f"{host.address}/24", "dev", device)
    host.run("ip", "link", "set", device, "up")
    host.run("ip", "route", "add", "default", "via", router.address)
