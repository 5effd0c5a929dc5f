"""The tcp links of a server whose ranks live on other hosts: their ports and keys, for as long as the server lives.

Used by whoever starts the server (supervisor, offline engine); knows no message.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from novainfer.config import OWN_ADDRESS
from novainfer.errors import ConfigError
from novainfer.transport.addresses import CurveKeys, Endpoint, RunDir, write_private
from novainfer.transport.channel import new_keys


@contextmanager
def cluster_links(run_dir: RunDir, host: str | None, replica: int = 0) -> Iterator[None]:
    """Publish tcp endpoints at `host` (an IP address of this host), with fresh keys, to all that read `run_dir`.

    'auto': the address that this host goes out with. None: ranks stay on this host, and nothing is published.
    Raises `ConfigError` if the address is not ours.
    """
    files = run_dir.workers_file(replica), run_dir.rank_reports_file
    for file in files:  # of a server that was killed here
        file.unlink(missing_ok=True)
    if host is None:
        yield
        return
    if host == OWN_ADDRESS:
        host = _own_address()
    keys = new_keys()
    with _reserved_port(host) as workers_port, _reserved_port(host) as reports_port:
        try:
            for file, port in zip(files, (workers_port, reports_port), strict=True):
                write_private(file, _tcp(host, port, keys).to_json())
            yield
        finally:
            for file in files:
                file.unlink(missing_ok=True)


def _own_address() -> str:
    """What a packet to far away would name as its source. None is sent; the numbers are kept for examples."""
    for family, far_away in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far_away, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    raise ConfigError("this host has no default route, so --cluster-host has to name one of its addresses")


def _tcp(host: str, port: int, keys: CurveKeys) -> Endpoint:
    return Endpoint(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}", keys)


@contextmanager
def _reserved_port(host: str) -> Iterator[int]:
    """A free port that the system gives to nobody who asks for any, while a process of ours may bind it by its number.

    Linux: a socket that is bound and does not listen holds the number; SO_REUSEADDR (ZeroMQ sets it too) lets another
    one listen there, again after a restart. If a stranger takes that very number first, our bind fails loudly.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((host, 0))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}: {error.strerror} (--cluster-host)") from None
        yield holder.getsockname()[1]
