"""The files of a batch: any input is read line by line, an output that was broken off is mended, and no other file."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path

import pytest

from novainfer.entrypoints import batch_files
from novainfer.entrypoints.batch_files import count_lines, opened_input, opened_output, read_lines
from novainfer.entrypoints.batch_lines import Fault, Job, answered, digest_of, refused, unanswered
from novainfer.errors import ConfigError, NovaInferError

pytestmark = [pytest.mark.unit, pytest.mark.stage2]


def ok(custom_id: str, body: bytes = b"{}") -> bytes:
    return answered(Job(custom_id, "/v1/completions", b"{}"), 200, None, body).line


def bad(custom_id: str, status: int = 503) -> bytes:
    return answered(Job(custom_id, "/v1/completions", b"{}"), status, None, b"{}").line


def read_all(descriptor: int) -> list[tuple[int, bytes | None]]:
    async def main() -> list[tuple[int, bytes | None]]:
        return [item async for item in read_lines(descriptor)]

    return asyncio.run(main())


def resumed(path: Path, *more: bytes) -> set[bytes]:
    """The digests that are done; then `more` is added."""
    with opened_output(str(path), 0, resume=True, overwrite=False) as results:

        async def add() -> None:
            for line in more:
                await results.add(line)

        asyncio.run(add())
        return results.done


@pytest.mark.parametrize("chunk", [1, 2, 5, 1 << 18])
def test_given_lines_however_they_come_when_read_then_each_has_its_number_and_blank_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(batch_files, "_CHUNK", chunk)
    monkeypatch.setattr(batch_files, "MAX_LINE_BYTES", 6)
    path = tmp_path / "in"
    path.write_bytes(b"one\n\n  \r\nfour\r\nfar too long\n123456\n1234567\nend")
    found = [(1, b"one"), (4, b"four\r"), (5, None), (6, b"123456"), (7, None), (8, b"end")]
    with opened_input(str(path)) as descriptor:
        assert asyncio.run(count_lines(descriptor)) == 8
        assert read_all(descriptor) == found
    reading, writing = os.pipe()
    os.write(writing, path.read_bytes() + b"\n")
    os.close(writing)
    assert asyncio.run(count_lines(reading)) is None
    assert read_all(reading) == found
    os.close(reading)


def test_given_an_input_that_is_not_there_when_opened_then_it_says_so(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"), opened_input(str(path)):
            pass


def test_given_an_output_without_failures_when_resumed_then_only_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out"
    whole = ok("a") + ok("é\ud800")
    for torn in (b"", b"{", ok("c")[:-1], ok("c")[:30]):
        path.write_bytes(whole + torn)
        inode = path.stat().st_ino
        assert resumed(path) == {digest_of("a"), digest_of("é\ud800")}
        assert (path.read_bytes(), path.stat().st_ino) == (whole, inode)
    assert resumed(path, ok("d")) == {digest_of("a"), digest_of("é\ud800")}
    assert [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()] == ["a", "é\ud800", "d"]


def test_given_an_output_with_failures_when_resumed_then_these_go_and_the_rest_keeps_its_order(tmp_path: Path) -> None:
    path = tmp_path / "out"
    first, second, again = ok("a"), ok("b"), ok("a", b"[]")
    lost = unanswered(Job("d", "/v1/completions", b"{}"), "gone").line
    path.write_bytes(
        bad("x") + first + bad("y", 400) + lost + second + refused(Fault("c", "m", 1, "z")).line + again + b"{"
    )
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert resumed(link, ok("x")) == {digest_of("a"), digest_of("b")}
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines[:2] == [first, second]
    assert [json.loads(line)["custom_id"] for line in lines[2:]] == ["x"]
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "out"]


@pytest.mark.parametrize(
    "content",
    [b"my thesis", b"my thesis\n", b'{"id": "x"}\n', ok("a") + b"\x00\x00\n" + ok("b"), ok("a") + b"[1]", b"[" * 10**5],
)
def test_given_a_file_that_is_something_else_when_resumed_then_it_is_left_as_it_is(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        resumed(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_given_an_output_with_results_when_opened_then_nothing_is_lost_unless_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(ok("a"))
    with (
        pytest.raises(ConfigError, match="--resume goes on"),
        opened_output(str(path), 0, resume=False, overwrite=False),
    ):
        pass
    assert path.read_bytes().count(b"\n") == 1
    with opened_output(str(path), 0, resume=False, overwrite=True) as results:
        assert results.done == set()
    assert path.read_bytes() == b""


def test_given_an_output_that_a_batch_writes_when_another_one_opens_it_then_that_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(bad("x"))
    with opened_output(str(path), 0, resume=True, overwrite=False):
        for resume in (True, False):
            with (
                pytest.raises(ConfigError, match="another batch is writing"),
                opened_output(str(path), 0, resume=resume, overwrite=not resume),
            ):
                pass
    assert resumed(path) == set()


def test_given_the_input_or_a_folder_as_output_when_opened_then_that_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"{}\n")
    with opened_input(str(path)) as descriptor:
        for name in (path, tmp_path, tmp_path / "none" / "out"):
            with (
                pytest.raises(ConfigError),
                opened_output(str(name), descriptor, resume=False, overwrite=True),
            ):
                pass
    assert path.read_bytes() == b"{}\n"


def test_given_a_pipe_as_output_when_lines_are_longer_than_it_then_they_come_whole_one_after_another(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    lines = [bytes([letter]) * 300_000 + b"\n" for letter in b"abcd"]
    got: list[bytes] = []
    with (
        opened_output(str(path), 0, resume=False, overwrite=False) as results,
        open(os.open(path, os.O_RDONLY), "rb") as pipe,
    ):
        reader = threading.Thread(target=lambda: got.extend(pipe.readline() for _ in lines))
        reader.start()

        async def add_all() -> None:
            await asyncio.gather(*(results.add(line) for line in lines))

        asyncio.run(add_all())
        reader.join()
    assert sorted(got) == lines


def test_given_a_disk_that_is_full_when_a_line_is_written_then_that_and_all_after_it_fail() -> None:
    async def main() -> None:
        with opened_output("/dev/full", 0, resume=False, overwrite=False) as results:
            for _ in range(2):
                with pytest.raises(NovaInferError, match="cannot write the output: No space"):
                    await results.add(ok("a"))

    asyncio.run(main())
