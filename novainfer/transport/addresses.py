"""Where the sockets are: one run directory (0700) per server, or TCP with CURVE keys between hosts."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import stat
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from novainfer.errors import ConfigError

# sun_path holds 108 bytes with the final NUL; ZeroMQ needs the whole path in it.
_MAX_IPC_PATH = 107
MIN_SPACE = 16 * 2**20  # bytes; logs of Ray are most of it


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Z85 keys of one server and the single client identity that may talk to it (40 characters each)."""

    server_public: str
    server_secret: str = field(repr=False)  # empty at a client
    client_public: str
    client_secret: str = field(repr=False)


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
        if self.curve is None and not _is_loopback(urlsplit(self.address).hostname or ""):
            raise ConfigError(f"{self.address} is reachable from other hosts and needs CURVE keys")

    def for_client(self) -> Endpoint:
        """The same endpoint without the server's secret key, which is no business of those who connect."""
        return self if self.curve is None else replace(self, curve=replace(self.curve, server_secret=""))

    def to_json(self) -> str:
        """For another process; `from_json` gives an equal object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Endpoint:
        """Undo `to_json`."""
        data = json.loads(text)
        return cls(data["address"], None if data["curve"] is None else CurveKeys(**data["curve"]))


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory that holds a server's sockets and its resolved configuration.

    The processes of a server share a host and talk over ipc: `gateways`, `supervisor`, `orders`. Ranks may live on
    another host: `workers` and `rank_reports` are ipc too, until `cluster_links` has published a tcp endpoint with
    CURVE keys here.
    """

    PREFIX: ClassVar[str] = "novainfer-"  # of the names of temporary ones

    path: Path

    @classmethod
    def create(cls, path: str | None) -> RunDir:
        """Make (or check) the directory with mode 0700; raises `ConfigError` if others could enter it."""
        if path is None:
            return cls(Path(tempfile.mkdtemp(prefix=cls.PREFIX)))
        directory = Path(path)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{directory} cannot be made: {error.strerror}") from None
        if not is_private(directory.stat()):
            raise ConfigError(f"{directory} must belong to this user and have mode 0700")
        return cls(directory)

    @property
    def config_file(self) -> Path:
        """The resolved `ServeConfig` as JSON, written by the supervisor, read by the children."""
        return self.path / "config.json"

    def gateways(self, replica: int) -> Endpoint:
        """Where scheduler `replica` listens for gateways. Always ipc."""
        return self._ipc(f"scheduler-{replica}.gateways")

    def supervisor(self) -> Endpoint:
        """Where the supervisor listens for its child processes. Always ipc."""
        return self._ipc("supervisor")

    def control(self) -> Endpoint:
        """Where the supervisor of several replicas takes commands. Always ipc."""
        return self._ipc("control")

    def orders(self, replica: int) -> Endpoint:
        """Where scheduler `replica` listens for its supervisor. Always ipc."""
        return self._ipc(f"scheduler-{replica}.orders")

    def workers(self, replica: int) -> Endpoint:
        """Where scheduler `replica` listens for its worker ranks: ipc, or tcp with keys."""
        return self._published(self.workers_file(replica)) or self._ipc(f"scheduler-{replica}.workers")

    def rank_reports(self) -> Endpoint:
        """Where the supervisor listens for worker ranks: with its child processes, or tcp with keys."""
        return self._published(self.rank_reports_file) or self.supervisor()

    def workers_file(self, replica: int) -> Path:
        """The tcp endpoint of `workers`, if ranks may live on other hosts. Holds secret keys."""
        return self.path / f"scheduler-{replica}.workers.json"

    def metrics_file(self, gateway: int) -> Path:
        """What gateway `gateway` has counted."""
        return self.path / f"gateway-{gateway}.metrics"

    def metrics_files(self) -> list[Path]:
        """Those of all gateways."""
        return sorted(self.path.glob("gateway-*.metrics"))

    @property
    def rank_reports_file(self) -> Path:
        """The tcp endpoint of `rank_reports`, if ranks may live on other hosts. Holds secret keys."""
        return self.path / "supervisor.ranks.json"

    def _ipc(self, name: str) -> Endpoint:
        return Endpoint(f"ipc://{self.path}/{name}")

    def _published(self, file: Path) -> Endpoint | None:
        return Endpoint.from_json(file.read_text(encoding="utf-8")) if file.exists() else None


def is_private(status: os.stat_result) -> bool:
    """Whether it is a directory of this user that nobody else may enter."""
    mode = status.st_mode
    return stat.S_ISDIR(mode) and status.st_uid == os.getuid() and not stat.S_IMODE(mode) & 0o077


def check_space(folder: Path) -> None:
    """Raise `ConfigError` if files will not fit into `folder`, which need not exist yet.

    Ray, whose files are there too, would look for half a minute for servers that could not write theirs.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if free < MIN_SPACE:
        raise ConfigError(
            f"there are {free // 1024} KiB free in {there}; a server needs {MIN_SPACE // 2**20} MiB for its files "
            "(choose another --run-dir or TMPDIR)"
        )


def write_private(path: Path, text: str) -> None:
    """Replace a file as a whole; what it holds nobody else may read, not even for a moment: it may be keys.

    The old one stays if that fails (a full disk).
    """
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
