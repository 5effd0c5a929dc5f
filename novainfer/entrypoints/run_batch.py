"""`novainfer run-batch`: a file of requests in OpenAI's batch format becomes a file of answers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Never

from novainfer.config import ServeConfig, check
from novainfer.entrypoints.api_client import ApiClient
from novainfer.entrypoints.batch_client import Answer, KeptClient, NoAnswer
from novainfer.entrypoints.batch_files import (
    MAX_LINE_BYTES,
    STANDARD,
    ResultFile,
    count_lines,
    opened_input,
    opened_output,
    read_lines,
)
from novainfer.entrypoints.batch_lines import (
    DUPLICATE,
    INVALID,
    Fault,
    Job,
    Outcome,
    answered,
    digest_of,
    parse_line,
    refused,
    unanswered,
)
from novainfer.entrypoints.batch_progress import BatchProgress
from novainfer.entrypoints.options import OPTIONS, render, resolve
from novainfer.errors import ConfigError

FOREIGN_CONCURRENCY = 128  # beside a server that does not say how many sequences it runs at once
QUEUED_PER_ROW = 2  # requests for each sequence that runs: the next one waits when a row is free
FIRST_PATIENCE = 10.0  # seconds for a server to say how many that are
OTHER_FILES = 64  # descriptors beside connections
SIGNAL_STATUS = 128  # and the signal's number


@dataclass(frozen=True, slots=True)
class _Own:
    """The server to start."""

    config: ServeConfig
    without_effect: Sequence[str]


def run_batch_command(arguments: argparse.Namespace) -> int:
    """0: all lines were answered with 200; 1: some were not. Raises `ConfigError`, before anything is sent."""
    server: KeptClient | _Own
    if arguments.url is None:
        resolved = resolve(arguments, os.environ)
        check(resolved.config)
        if arguments.print_config:
            print(render(resolved), end="")
            return 0
        server = _Own(resolved.config, resolved.without_effect)
    else:
        server = _running_server(arguments)
    if arguments.output_file == STANDARD and arguments.resume:
        raise ConfigError("--resume needs a file: what has been written to standard output is not known")
    if arguments.resume and arguments.overwrite:
        raise ConfigError("--resume and --overwrite exclude each other")
    with (
        opened_input(arguments.input_file) as source,
        opened_output(arguments.output_file, source, resume=arguments.resume, overwrite=arguments.overwrite) as results,
    ):
        return asyncio.run(_until_signal(_Run(arguments, server, source, results)))


def _running_server(arguments: argparse.Namespace) -> KeptClient:
    if not arguments.url:
        raise ConfigError("--url is given but empty")
    given = [OPTIONS[name].flag for name in vars(arguments) if name in OPTIONS and name != "api_key"]
    given += arguments.without_effect
    for name in ("config", "preset", "print_config"):
        given += [f"--{name.replace('_', '-')}"] if getattr(arguments, name) else []
    given += ["MODEL"] if arguments.model_argument is not None else []
    if given:
        raise ConfigError(f"{given[0]} is for a server that is started here, and --url names a running one")
    known = ApiClient.from_options(arguments.url, arguments.api_key[0] if "api_key" in arguments else None)
    return _client(arguments, known.base_url, known.api_key)


async def _until_signal(run: _Run) -> int:
    """The exit status: also of a run that a signal ends, in an orderly way."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[signal.Signals] = loop.create_future()

    def stop(number: signal.Signals) -> None:
        if not stopped.done():
            stopped.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    work = loop.create_task(run.run())
    ends: tuple[asyncio.Future[int], asyncio.Future[signal.Signals]] = (work, stopped)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
    if not work.cancelled():
        return work.result()
    run.progress.say(f"stopped by {stopped.result().name}; --resume goes on from here")
    return SIGNAL_STATUS + stopped.result()


class _Run:
    """One batch, from its first line to its last."""

    def __init__(
        self, arguments: argparse.Namespace, server: KeptClient | _Own, source: int, results: ResultFile
    ) -> None:
        self.progress = BatchProgress()
        self._arguments = arguments
        self._server = server
        self._source = source
        self._results = results
        self._turn = asyncio.Lock()  # to take the next line

    async def run(self) -> int:
        """The exit status. Raises `NovaInferError` for what ends the whole batch."""
        items = self._items()
        first = await anext(items, None)
        if first is None:  # no server has to be started for that
            self.progress.tell_sum()
            return self.progress.exit_status()
        items = _with(first, items)
        if isinstance(self._server, KeptClient):
            return await self._send_all(self._server, items)
        from novainfer.entrypoints.batch_server import ServerEnded, own_server

        try:
            async with own_server(self._server.config, self._server.without_effect) as server:
                work = self._send_all(_client(self._arguments, server.url, server.api_key), items)
                return await _while_serving(work, server.ended())
        except ServerEnded as error:
            self.progress.say(str(error))
            return 2 if error.status == 2 else 1

    async def _send_all(self, client: KeptClient, items: AsyncIterator[Job | Fault]) -> int:
        with contextlib.closing(client):
            told = await _concurrency(client)
            concurrency = self._arguments.concurrency or told
            _allow_connections(concurrency)
            async with self.progress.shown(client, partial(count_lines, self._source)):
                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(concurrency):
                            group.create_task(self._work(client, items))
                except BaseExceptionGroup as errors:
                    raise errors.exceptions[0] from None
        return self.progress.exit_status()

    async def _work(self, client: KeptClient, items: AsyncIterator[Job | Fault]) -> None:
        while True:
            async with self._turn:
                item = await anext(items, None)
            if item is None:
                return
            outcome = refused(item) if isinstance(item, Fault) else await _outcome(client, item)
            await self._results.add(outcome.line)
            self.progress.count(outcome)

    async def _items(self) -> AsyncIterator[Job | Fault]:
        """What the lines ask for, but for those that are answered in the output already."""
        seen: set[bytes] = set()
        async for number, line in read_lines(self._source):
            if line is None:
                yield Fault(INVALID, f"the line has more than {MAX_LINE_BYTES} bytes", number)
                continue
            item = parse_line(line, number, seeds_from_ids=self._arguments.seeds_from_ids)
            if isinstance(item, Job):
                digest = digest_of(item.custom_id)
                if digest in seen:
                    item = Fault(DUPLICATE, "the same custom_id is in a line above", number, item.custom_id)
                elif digest in self._results.done:
                    self._results.done.discard(digest)  # each is kept once
                    seen.add(digest)
                    self.progress.skip()
                    continue
                seen.add(digest)
            yield item


def _client(arguments: argparse.Namespace, url: str, key: str | None) -> KeptClient:
    return KeptClient(url, key, timeout=arguments.timeout, retry_for=arguments.retry_for)


async def _with(first: Job | Fault, others: AsyncIterator[Job | Fault]) -> AsyncIterator[Job | Fault]:
    yield first
    async for item in others:
        yield item


def _allow_connections(count: int) -> None:
    """Descriptors for so many, as far as the system lets us have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _outcome(client: KeptClient, job: Job) -> Outcome:
    try:
        answer = await client.ask_patiently(job.url, job.payload)
    except NoAnswer as error:
        return unanswered(job, str(error))
    return answered(job, answer.status, answer.headers.get("x-request-id"), answer.data)


async def _while_serving(work: Coroutine[None, None, int], ended: Coroutine[None, None, Never]) -> int:
    """What the work gives, unless the server ends before."""
    tasks: list[asyncio.Task[int]] = [asyncio.create_task(each) for each in (work, ended)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _concurrency(client: KeptClient) -> int:
    """Requests at once that keep the server's batch full. Raises `ConfigError` if it does not let us in."""
    try:
        async with asyncio.timeout(FIRST_PATIENCE):
            answer = await client.ask("GET", "/server_info")
    except (NoAnswer, TimeoutError):
        return FOREIGN_CONCURRENCY
    if answer.status in (401, 403):
        raise ConfigError(f"{client.base_url} wants another key: {answer.status}")
    return _room(answer) or FOREIGN_CONCURRENCY


def _room(answer: Answer) -> int:
    """Requests that a server can make use of at once, by its `/server_info`; 0: it does not say."""
    try:
        info = json.loads(answer.data)
        rows = info["limits"]["max_num_seqs"] * info["parallel"]["replicas"]
        room = min(QUEUED_PER_ROW * rows, info["limits"]["max_live_requests"])
    except (ValueError, KeyError, TypeError):
        return 0
    return room if type(room) is int and room > 0 else 0
