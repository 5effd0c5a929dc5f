"""`novainfer serve`: checks what can be checked before anything starts, then becomes the supervisor."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import setproctitle

from novainfer.checkpoint import check_model, check_split, resolve_checkpoint
from novainfer.config import ServeConfig, check
from novainfer.entrypoints.foreign_flags import log_without_effect
from novainfer.entrypoints.keys import seal_keys
from novainfer.entrypoints.options import render, resolve
from novainfer.errors import ConfigError
from novainfer.logs import configure
from novainfer.text.preflight import check_text_files
from novainfer.transport.addresses import RunDir, check_space, is_private, write_private
from novainfer.transport.cluster import cluster_links
from novainfer.transport.replicas import REPLICA_DIR, remove_ray_files
from workers.kept_config import tell_zygote
from workers.weight_ahead import read_ahead

LOCK = "lock"  # in a run directory; held while a server runs there
TEMPORARY = b"temporary\n"  # written into the lock once it is held, if the directory is ours from the start


def serve_command(arguments: argparse.Namespace) -> int:
    """Run a server with the options of the command line; returns the exit status. Raises `ConfigError`."""
    resolved = resolve(arguments, os.environ)
    check(resolved.config)
    if arguments.print_config:
        print(render(resolved), end="")
        return 0
    # Ray and the workers inherit this environment; keys are none of their business.
    os.environ.pop("NOVAINFER_API_KEY", None)
    return serve(resolved.config, resolved.without_effect)


def serve(config: ServeConfig, without_effect: Sequence[str] = ()) -> int:
    """Serve until SIGTERM or SIGINT; 0 after an orderly end. Raises `ConfigError` before anything starts.

    without_effect: flags and options of other servers that were given.
    """
    check(config)
    _check_traces(config.server.otlp_traces_endpoint)
    model = config.model
    folder = check_model(model)
    if config.parallel.executor == "model":
        check_split(folder, config.parallel.tensor_parallel_size)
    tell_zygote(folder, config)
    if config.parallel.cluster_host is None:  # else the ranks' hosts see to it (`RankHost`)
        read_ahead(folder, config, range(config.parallel.tensor_parallel_size))
    text = folder if model.tokenizer is None else resolve_checkpoint(model.tokenizer, revision=model.revision)
    configure("supervisor", config.server)
    log_without_effect(without_effect)
    check_text_files(text, model.chat_template)
    with held_port(config) as config:
        return _serve(seal_keys(config))


def _check_traces(endpoint: str | None) -> None:
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-traces-endpoint must be an http:// or https:// URL, not {endpoint!r}")
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter") is None:
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'novainfer[otel]'")


def _serve(config: ServeConfig) -> int:
    setproctitle.setproctitle("novainfer: supervisor")
    with run_directory(config) as run_dir:
        if config.parallel.replicas is not None:
            from novainfer.entrypoints.fleet import run_fleet

            return run_fleet(config, run_dir)
        from novainfer.entrypoints.supervisor import run_supervisor

        return run_supervisor(config, run_dir)


@contextlib.contextmanager
def held_port(config: ServeConfig) -> Iterator[ServeConfig]:
    """The config with a port that is ours: port 0 becomes a real number. Raises `ConfigError` if it is taken.

    On Linux it stays bound: a connection to somewhere else would get its number as soon as no gateway listens, when the
    first has not begun to or one has died. Gateways listen there all the same, as all have SO_REUSEADDR.
    """
    host, port = config.server.host, config.server.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        holder = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _no_port(host, port, error) from None
    with holder:
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports of closed connections are free
            holder.bind(address)
        except OSError as error:
            raise _no_port(host, port, error) from None
        free = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield replace(config, server=replace(config.server, port=free))


def _no_port(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror} (try another --port)")


@contextlib.contextmanager
def run_directory(config: ServeConfig) -> Iterator[RunDir]:
    """The directory of this server with its `config.json`; everything in it that is ours is gone afterwards.

    Raises `ConfigError` if another server uses the directory.
    """
    given = config.server.run_dir
    existed = given is not None and Path(given).exists()
    if given is None:
        remove_abandoned()
    run_dir = RunDir.create(given)
    with contextlib.ExitStack() as stack:
        if not existed:
            stack.callback(_remove_all, run_dir.path)
        check_space(run_dir.path)
        run_dir.supervisor().check()  # a path that is too long fails here, not in a child
        lock = stack.enter_context(open(run_dir.path / LOCK, "wb"))
        _take_lock(lock.fileno(), run_dir)
        if given is None:
            lock.write(TEMPORARY)
            lock.flush()
        if existed:
            stack.callback((run_dir.path / LOCK).unlink, missing_ok=True)
            stack.callback(_remove_files, run_dir)
            _remove_files(run_dir)  # of a server that was killed here: ours would believe them
        write_private(run_dir.config_file, config.to_json())
        if config.parallel.replicas is None:  # else each has its own
            stack.enter_context(cluster_links(run_dir, config.parallel.cluster_host))
        yield run_dir


def remove_abandoned() -> None:
    """Remove temporary run directories whose server was killed: they say what they are, and nobody holds their lock.

    Others may write there, too: nothing but a regular file in a private directory of this user is looked at.
    """
    for directory in Path(tempfile.gettempdir()).glob(f"{RunDir.PREFIX}*"):
        with contextlib.suppress(OSError):  # also: no lock, and so not a server's
            if not is_private(directory.lstat()):
                continue
            with os.fdopen(os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "r+b") as lock:
                if stat.S_ISREG(os.fstat(lock.fileno()).st_mode):
                    fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if lock.read() == TEMPORARY:
                        _remove_all(directory)


def _remove_all(directory: Path) -> None:
    """Whatever can be removed; the lock last, so that another server can go on if we are killed."""
    remove_ray_files(directory)
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _take_lock(descriptor: int, run_dir: RunDir) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another server uses the run directory {run_dir.path}") from None


def _remove_files(run_dir: RunDir) -> None:
    """All that servers leave, but the lock."""
    for pattern in (
        "config.json",
        "config.json.new",
        "supervisor",
        "supervisor.*",
        "control",
        "replicas.json*",
        "scheduler-*",
        "gateway-*",
        "ranks-*",
    ):
        for path in run_dir.path.glob(pattern):
            if not path.is_dir():  # else somebody else's
                path.unlink(missing_ok=True)
    remove_ray_files(run_dir.path)
    for path in run_dir.path.glob(f"{REPLICA_DIR}*"):
        shutil.rmtree(path, ignore_errors=True)
