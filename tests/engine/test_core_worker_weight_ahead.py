"""Packed weights are read from the disk while those who will map them still start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch

from kernels.backend import select_backend
from novainfer.config import DEMO_MODEL, ModelConfig, ParallelConfig, ServeConfig, ServerConfig
from novainfer.entrypoints import serve
from novainfer.transport.addresses import Endpoint
from workers import rank_host, weight_ahead
from workers.checkpoint import find_checkpoint
from workers.launch import RankLaunch, RankPlace
from workers.tensor_parallel import TensorParallel
from workers.weight_ahead import read_ahead
from workers.weight_key import weight_key

pytestmark = pytest.mark.stage1

MIB = 1 << 20
ON_CPUS = ServeConfig(parallel=ParallelConfig(device="cpu"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files are looked for."""
    monkeypatch.setattr(weight_ahead, "cache_dir", lambda: tmp_path)
    folder = tmp_path / "weights"
    folder.mkdir()
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are to be read, in place of their reading."""
    paths: list[str] = []
    monkeypatch.setattr(weight_ahead, "_read", lambda path: paths.append(path.name))
    return paths


def ahead(config: ServeConfig, *ranks: int) -> None:
    """Read ahead to the end."""
    thread = read_ahead(find_checkpoint(DEMO_MODEL, None), config, ranks or (0,))
    if thread is not None:
        thread.join()


def label(config: ServeConfig, rank: int = 0, world_size: int = 1) -> str:
    return weight_ahead.weight_label(find_checkpoint(DEMO_MODEL, None), config.model, rank, world_size)


def in_memory(file: IO[bytes]) -> int:
    """Bytes from the file's begin on that come without the disk."""
    try:
        return os.preadv(file.fileno(), [bytearray(8 * MIB)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux reads ahead")
def test_file_given_it_is_not_in_memory_when_read_ahead_then_all_of_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_ahead, "_PIECE_BYTES", 2 * MIB)
    path = folder / f"{label(ON_CPUS)}-a.weights"
    path.write_bytes(bytes(5 * MIB + 17))
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if in_memory(file):
            pytest.skip("this file system has its files in memory")
        ahead(ON_CPUS)
        assert in_memory(file) == 5 * MIB + 17


def test_files_given_several_when_read_ahead_then_each_ranks_last_used_one_of_this_checkpoint_and_type(
    folder: Path, asked: list[str]
) -> None:
    parallel = ParallelConfig(device="cpu", tensor_parallel_size=2)
    config = ServeConfig(parallel=parallel)
    other = ServeConfig(model=ModelConfig(quantization="int8"), parallel=parallel)
    ahead(config, 0, 1)
    assert not asked
    first = label(config, 0, 2)
    for number, name in enumerate(
        (
            f"{first}-b.weights",
            f"{first}-c.weights",
            f"{first}-a.weights",
            f"{label(config, 1, 2)}-a.weights",
            f"{first}-unfinished.part",
            f"{label(config, 0, 1)}-a.weights",
            f"{label(other, 0, 2)}-a.weights",
        )
    ):
        (folder / name).write_bytes(b"some")
        os.utime(folder / name, (number, number))
    os.utime(folder / f"{first}-c.weights")  # who maps one does so
    ahead(config, 0, 1)
    assert asked == [f"{first}-c.weights", f"{label(config, 1, 2)}-a.weights"]


@pytest.mark.parametrize(
    "config",
    [
        ServeConfig(model=ModelConfig(weight_cache_gib=0.0)),
        ServeConfig(parallel=ParallelConfig(device="cuda")),
        ServeConfig(parallel=ParallelConfig(executor="null")),
    ],
)
def test_file_given_a_server_that_maps_none_when_read_ahead_then_it_is_not(
    folder: Path, asked: list[str], config: ServeConfig
) -> None:
    (folder / f"{label(config)}-a.weights").write_bytes(b"some")
    ahead(config)
    assert not asked


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_file_given_it_is_empty_or_gone_when_read_ahead_then_nothing_happens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / f"{label(ON_CPUS)}-a.weights").write_bytes(b"")
    ahead(ON_CPUS)
    monkeypatch.setattr(weight_ahead, "_last_used", lambda _: folder / "gone")
    ahead(ON_CPUS)


@pytest.mark.parametrize("cluster_host", [None, "10.0.0.1"])
def test_server_when_it_starts_then_the_file_that_its_rank_will_map_is_read_once_and_on_the_ranks_host(
    folder: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch, cluster_host: str | None
) -> None:
    config = ServeConfig(
        model=ModelConfig(model=str(find_checkpoint(DEMO_MODEL, None))),
        parallel=ParallelConfig(device="cpu", cluster_host=cluster_host, ray_address=cluster_host),
        server=ServerConfig(port=0),
    )
    key = weight_key(config.model, select_backend(torch.device("cpu")), TensorParallel.single())
    (folder / f"{key}.weights").write_bytes(b"some")
    began: list[threading.Thread] = []

    def keep(*arguments: Any) -> None:
        thread = read_ahead(*arguments)
        assert thread is not None
        began.append(thread)

    for module in (serve, rank_host):
        monkeypatch.setattr(module, "read_ahead", keep)
    monkeypatch.setattr(serve, "_serve", lambda config: 0)
    assert serve.serve(config) == 0
    assert len(began) == (cluster_host is None)
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(rank_host, "_zygote", lambda: SimpleNamespace(fork=lambda slot: ours))
    monkeypatch.setattr(rank_host, "session_dir", lambda: "")
    place = RankPlace(rank=0, world_size=1, epoch=1, meeting_point="")
    launch = RankLaunch(config=config, replica=0, place=place, scheduler=Endpoint("ipc://none"), supervisor=None)
    with theirs:
        theirs.shutdown(socket.SHUT_WR)  # a rank that ends at once
        rank_host.RankHost().run(launch.to_json())
    (thread,) = began
    thread.join()
    assert asked == [f"{key}.weights"]


def test_process_that_reads_ahead_when_it_begins_then_it_imports_neither_torch_nor_ray() -> None:
    code = "import sys, novainfer.entrypoints.serve as serve\nassert serve.read_ahead\n"
    code += "sys.exit(bool({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
