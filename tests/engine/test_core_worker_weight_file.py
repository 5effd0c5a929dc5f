"""Packed weights in a file that the next process maps."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO
from unittest.mock import Mock

import pytest
import torch

from kernels.backend import select_backend
from kernels.native.library import load_library
from kernels.weights import Kind
from novainfer.config import DEMO_MODEL, CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, ServeConfig
from novainfer.errors import EngineError
from novainfer.protocol.columns import column
from novainfer.protocol.step import WORKER_SCHEMA, Shutdown, StepPlan, StepResult
from workers import weight_ahead, weight_file, weight_key
from workers.checkpoint import find_checkpoint
from workers.launch import RankPlace
from workers.step_loop import StepLoop
from workers.tensor_parallel import TensorParallel
from workers.weight_file import BesideSteps, WeightFile
from workers.worker import Worker

pytestmark = pytest.mark.stage1

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files are kept, however small."""
    monkeypatch.setattr(weight_file, "_LEAST_BYTES", 0)
    monkeypatch.setattr(weight_ahead, "cache_dir", lambda: tmp_path)
    return tmp_path / "weights"


def build(**model: object) -> Worker:
    config = ServeConfig(
        model=ModelConfig(max_model_len=64, **model),  # type: ignore[arg-type]
        cache=CacheConfig(num_blocks=8),
        scheduler=SchedulerConfig(max_num_seqs=2),
        parallel=ParallelConfig(device="cpu"),
    )
    place = RankPlace(rank=0, world_size=1, epoch=1, meeting_point="")
    return Worker.build(config, place, lambda stage, done, total: None)


def write_all(kept: WeightFile) -> None:
    """As an idle worker does, to the end."""
    while kept.write_next():
        pass
    join_writers()


def join_writers() -> None:
    """Wait until the disk has what was written."""
    for thread in threading.enumerate():
        if thread.name == "packed weights":
            thread.join()


def kept(folder: Path, key: str, *sizes: int, limit: int = 64 * MIB) -> WeightFile:
    """A file of tensors of these sizes; their bytes say which is which."""
    file = WeightFile(folder, key, limit)
    for number, size in enumerate(sizes, start=1):
        tensor = torch.full((size,), number, dtype=torch.uint8)
        assert file.next(Kind((size,), torch.uint8)) is None
        file.add(Kind((size,), torch.uint8), tensor)
    write_all(file)
    return file


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8"])
def test_worker_given_weights_that_another_one_packed_when_built_then_maps_them_and_computes_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    first = build(quantization=quantization)
    assert first.weight_file is not None
    assert first.weight_file.mapped_bytes == 0
    while first.use_idle_time():
        pass
    write_all(first.weight_file)
    (path,) = folder.iterdir()
    assert path.suffix == ".weights"

    def pack(*_: object) -> int:
        raise AssertionError("packed once more")

    library = load_library()
    for name in ("pack_linear", "quantize"):
        monkeypatch.setattr(library, name, pack)
    second = build(quantization=quantization)
    assert second.weight_file is not None
    assert 0 < second.weight_file.mapped_bytes <= path.stat().st_size
    assert second.fingerprint == first.fingerprint
    assert not second.use_idle_time()
    assert names(folder) == {path.name}


class BusySocket:
    """A scheduler that has the next plan ready before it is asked for."""

    def __init__(self, num_plans: int) -> None:
        none = column()
        plans = [StepPlan(1, i, rows=none, num_new_tokens=none, is_first=i == 0) for i in range(num_plans)]
        self._messages: list[object] = [*plans, Shutdown(epoch=2)]
        self.sent: list[object] = []

    def poll(self, timeout: int) -> int:
        return 1

    def recv(self) -> bytes:
        return WORKER_SCHEMA.encode(self._messages.pop(0))

    def send(self, data: bytes, flags: int) -> None:
        self.sent.append(WORKER_SCHEMA.decode(data))


def test_worker_that_never_idles_when_it_has_run_for_a_while_then_it_writes_its_weights_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_file, "_SHARE_OF_TIME", 0)
    monkeypatch.setattr(weight_file, "_PIECE_BYTES", 64 << 10)
    place = RankPlace(rank=0, world_size=1, epoch=1, meeting_point="")
    for seconds, is_written in ((1e9, False), (0.0, True)):
        monkeypatch.setattr(weight_file, "_BUSY_SECONDS", seconds)
        worker, socket = build(), BusySocket(num_plans=200)
        StepLoop(worker, place, socket, SimpleNamespace()).run()  # type: ignore[arg-type]
        assert len([message for message in socket.sent if isinstance(message, StepResult)]) == 200
        join_writers()
        assert bool(names(folder)) == is_written
    assert build().weight_file.mapped_bytes  # type: ignore[union-attr]


def test_writing_beside_steps_given_what_each_piece_takes_when_it_goes_on_then_it_has_its_share_of_the_time() -> None:
    now = 1000.0
    written: list[float] = []

    def write_next() -> bool:
        nonlocal now
        written.append(now)
        now += 0.5
        return len(written) < 3

    beside = BesideSteps(write_next, num_ranks=2, clock=lambda: now)
    for moment in (1029.0, 1030.0, 1031.0, 1230.0, 1231.0, 1431.0, 1432.0, 1e6):
        now = max(now, moment)
        beside.turn()
    assert written == [1030.0, 1231.0, 1432.0]


def test_worker_given_no_disk_for_weights_when_built_then_none_is_used(folder: Path) -> None:
    worker = build(weight_cache_gib=0.0)
    assert worker.weight_file is None
    assert not worker.use_idle_time()
    assert not folder.exists()


@pytest.mark.parametrize("at", [0, 5000, -1, -12, -40])
def test_worker_given_a_file_with_a_wrong_byte_when_built_then_packs_anew(folder: Path, at: int) -> None:
    first = build()
    assert first.weight_file is not None
    write_all(first.weight_file)
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    path.write_bytes(data)
    second = build()
    assert second.weight_file is not None
    assert second.weight_file.mapped_bytes == 0
    assert second.fingerprint == first.fingerprint
    write_all(second.weight_file)  # a good one takes its place
    third = build()
    assert third.weight_file is not None
    assert third.weight_file.mapped_bytes > 0


@pytest.mark.parametrize("content", [b"", b"novapack", b"\xff" * 100, b"{}" + (2).to_bytes(8, "little") + b"novapack"])
def test_file_given_something_else_in_its_place_when_opened_then_it_is_removed(folder: Path, content: bytes) -> None:
    folder.mkdir()
    (folder / "a.weights").write_bytes(content)
    assert WeightFile(folder, "a", MIB).next(Kind((1,), torch.uint8)) is None
    assert not names(folder)


def test_file_given_tensors_of_many_sizes_when_read_again_then_each_is_there_aligned_and_in_order(
    folder: Path,
) -> None:
    sizes = (1, 64, 8 * MIB - 1, 3, 17 * MIB + 5, 8 * MIB)
    kept(folder, "a", *sizes)
    file = WeightFile(folder, "a", MIB)
    for number, size in enumerate(sizes, start=1):
        tensor = file.next(Kind((size,), torch.uint8))
        assert tensor is not None
        assert tensor.data_ptr() % 64 == 0
        assert int(tensor.min()) == int(tensor.max()) == number
    with pytest.raises(EngineError, match="tensor 6"):
        file.next(Kind((1,), torch.uint8))
    assert not names(folder)  # it is not what its key says


def test_file_given_another_shape_or_type_than_was_kept_when_asked_then_error_and_no_second_time(folder: Path) -> None:
    kinds = (((65,), torch.uint8, ""), ((64,), torch.int8, ""), (None, torch.uint8, ""), ((64,), torch.uint8, "other"))
    for kind in (Kind(*values) for values in kinds):
        kept(folder, "a", 64)
        with pytest.raises(EngineError, match="tensor 0"):
            WeightFile(folder, "a", MIB).next(kind)
        assert WeightFile(folder, "a", MIB).next(kind) is None


def test_tensor_given_its_file_was_removed_when_read_then_it_is_still_there(folder: Path) -> None:
    kept(folder, "a", 5 * MIB)
    tensor = WeightFile(folder, "a", MIB).next(Kind((5 * MIB,), torch.uint8))
    shutil.rmtree(folder)
    assert tensor is not None
    assert int(tensor.sum()) == 5 * MIB


def test_file_given_another_process_wrote_it_meanwhile_when_it_is_to_be_written_then_it_stays(folder: Path) -> None:
    first, second = WeightFile(folder, "a", MIB), WeightFile(folder, "a", MIB)
    for file in (first, second):
        file.add(Kind((64,), torch.uint8), torch.ones(64, dtype=torch.uint8))
        assert file.next(Kind((64,), torch.uint8)) is None
    write_all(first)
    number = (folder / "a.weights").stat().st_ino
    write_all(second)
    assert (folder / "a.weights").stat().st_ino == number
    assert names(folder) == {"a.weights"}


def test_folder_given_a_limit_when_more_is_kept_then_what_was_not_used_for_longest_goes(folder: Path) -> None:
    for number, key in enumerate("abc"):
        kept(folder, key, 2 * MIB)
        os.utime(folder / f"{key}.weights", (number, number))
    assert WeightFile(folder, "a", MIB).mapped_bytes  # used: now the newest
    kept(folder, "d", 2 * MIB, limit=7 * MIB)
    assert names(folder) == {"a.weights", "c.weights", "d.weights"}
    kept(folder, "e", 2 * MIB, limit=2 * MIB - 1)
    assert names(folder) == {"a.weights", "c.weights", "d.weights"}
    kept(folder, "e", 2 * MIB, limit=3 * MIB)
    assert names(folder) == {"e.weights"}


def test_file_given_that_it_may_be_read_alone_when_opened_then_it_is_mapped_and_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(folder, "a", MIB)
    monkeypatch.setattr(os, "utime", Mock(side_effect=PermissionError))
    assert WeightFile(folder, "a", MIB).mapped_bytes
    assert names(folder) == {"a.weights"}


def test_folder_given_files_of_writers_when_one_is_dead_then_its_file_goes_and_the_others_stay(folder: Path) -> None:
    folder.mkdir()
    (folder / "dead.part").write_bytes(b"some")
    with open(folder / "a.part", "wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        kept(folder, "a", MIB)  # another process does that already
        assert names(folder) == {"a.part"}
        kept(folder, "b", MIB)
        assert names(folder) == {"a.part", "b.weights"}
    kept(folder, "a", MIB)
    assert names(folder) == {"a.weights", "b.weights"}


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_file_given_a_disk_that_fails_when_written_then_nothing_is_left_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    kept(folder, "a", 9 * MIB)
    assert not names(folder)
    assert "No space left" in caplog.text


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("room", [10 * MIB - 1, 16 * MIB])  # the second piece does not fit, or the index alone
def test_file_given_a_disk_that_gets_full_when_written_then_the_worker_goes_on_and_nothing_is_left(
    folder: Path, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))  # writing beyond fails, as on a full disk
    try:
        kept(folder, "a", 16 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not names(folder)
    assert "not kept" in caplog.text


def test_file_given_a_folder_that_cannot_be_made_when_written_then_it_is_said(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.joinpath("weights").write_bytes(b"")
    kept(folder, "a", MIB)
    assert "not kept" in caplog.text


def test_file_given_a_disk_with_little_room_when_written_then_it_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_file, "_MOST_OF_FREE", 1 << 40)
    kept(folder, "a", MIB)
    assert not names(folder)


def test_folder_given_a_file_that_is_not_written_after_all_when_it_would_take_anothers_place_then_that_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(folder, "old", 2 * MIB)
    with open(folder / "new.part", "wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        kept(folder, "new", 2 * MIB, limit=3 * MIB)  # another process does that already
        assert names(folder) == {"old.weights", "new.part"}
    monkeypatch.setattr(weight_file, "_MOST_OF_FREE", 1 << 40)
    kept(folder, "new", 2 * MIB, limit=3 * MIB)  # the disk has too little room
    assert names(folder) == {"old.weights"}


def test_folder_given_a_full_disk_when_a_file_takes_anothers_place_then_the_others_bytes_count_as_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(folder, "old", 16 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    kept(folder, "new", 5 * MIB, limit=20 * MIB)
    assert names(folder) == {"old.weights"}
    kept(folder, "new", 4 * MIB, limit=19 * MIB)
    assert names(folder) == {"new.weights"}


def test_file_given_another_process_that_finishes_it_while_its_lock_is_waited_for_when_written_then_it_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 0

    def lock_late(file: IO[bytes]) -> bool:
        nonlocal number
        monkeypatch.setattr(weight_file, "_lock", lock)
        (folder / "a.weights").write_bytes(b"of the other")
        number = (folder / "a.weights").stat().st_ino
        return lock(file)

    lock = weight_file._lock
    file = WeightFile(folder, "a", 64 * MIB)
    file.add(Kind((64,), torch.uint8), torch.ones(64, dtype=torch.uint8))
    monkeypatch.setattr(weight_file, "_lock", lock_late)
    write_all(file)
    assert (folder / "a.weights").stat().st_ino == number
    assert names(folder) == {"a.weights"}


def test_key_given_another_checkpoint_rank_or_type_when_taken_then_it_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, tp = select_backend(CPU), TensorParallel.single()
    model = tmp_path / "model"
    shutil.copytree(find_checkpoint(DEMO_MODEL, None), model)
    config = ModelConfig(model=str(model))

    def key(tp: TensorParallel = tp, **changes: str) -> str:
        return weight_key.weight_key(replace(config, **changes), kernels, tp)

    first = key()
    assert key(max_model_len=7) == first  # type: ignore[arg-type]
    others = {key(dtype="float32"), key(quantization="int8"), key(model_backend="transformers")}
    others.add(key(TensorParallel(1, 2, None)))
    weights = model / "model.safetensors"
    stat = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # who hides the change of the content's time
    others.add(key())
    (model / "more.safetensors").write_bytes(b"")
    others.add(key())
    (model / "modeling_own.py").write_bytes(b"")
    others.add(key())
    monkeypatch.setattr(weight_key, "version", lambda package: "0.0")
    others.add(key())
    assert first not in others
    assert len(others) == 8
