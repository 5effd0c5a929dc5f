"""Where the sockets are: one run directory (0700) per server, or TCP with CURVE keys between hosts."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from novainfer.errors import ConfigError

# sun_path holds 108 bytes with the final NUL; ZeroMQ needs the whole path in it.
_MAX_IPC_PATH = 107
_LOOPBACK = ("127.", "localhost", "[::1]")


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Z85 keys of one server and the single client identity that may talk to it (40 characters each)."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A ZeroMQ address, with keys where it is reachable from other hosts."""

    address: str
    curve: CurveKeys | None = None

    def check(self) -> None:
        """Raise `ConfigError` unless the address is ipc, loopback, or carries keys."""
        if self.address.startswith("ipc://"):
            if len(os.fsencode(self.address[6:])) > _MAX_IPC_PATH:
                raise ConfigError(f"socket path is longer than {_MAX_IPC_PATH} bytes: {self.address}")
            return
        if not self.address.startswith("tcp://"):
            raise ConfigError(f"only ipc:// and tcp:// endpoints are supported, not {self.address}")
        host = urlsplit(self.address).netloc
        if self.curve is None and not host.startswith(_LOOPBACK):
            raise ConfigError(f"{self.address} is reachable from other hosts and needs CURVE keys")


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory that holds a server's sockets and its resolved configuration."""

    path: Path

    @classmethod
    def create(cls, path: str | None) -> RunDir:
        """Make (or check) the directory with mode 0700; raises `ConfigError` if others could enter it."""
        if path is None:
            return cls(Path(tempfile.mkdtemp(prefix="novainfer-")))
        directory = Path(path)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"{directory} must belong to this user and have mode 0700")
        return cls(directory)

    @property
    def config_file(self) -> Path:
        """The resolved `ServeConfig` as JSON, written by the supervisor, read by the children."""
        return self.path / "config.json"

    def gateways(self, replica: int) -> Endpoint:
        """Where scheduler `replica` listens for gateways."""
        return Endpoint(f"ipc://{self.path}/scheduler-{replica}.gateways")

    def workers(self, replica: int) -> Endpoint:
        """Where scheduler `replica` listens for its worker ranks."""
        return Endpoint(f"ipc://{self.path}/scheduler-{replica}.workers")

    def supervisor(self) -> Endpoint:
        """Where the supervisor listens for its children."""
        return Endpoint(f"ipc://{self.path}/supervisor")
