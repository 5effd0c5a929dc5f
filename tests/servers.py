"""Real servers for tests: `novainfer serve` as its own process tree, started and ended like a user would."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import openai
import psutil

READY = re.compile(r"NovaInfer is ready on (http://\S+)")
START_PATIENCE = 240  # seconds; a cold start on a busy machine
STOP_PATIENCE = 90
PAUSE = 0.02  # between two looks at what nobody tells of outside; who looks all the time takes the server's cores
_HELD = (
    "novainfer_gateway_live_requests",
    "novainfer_gateway_journal_entries",
    "novainfer_num_requests_running",
    "novainfer_num_requests_waiting",
    "novainfer_kv_cache_usage_ratio",
)


class RunningServer:
    """One `novainfer serve`. `stop` asserts that it ends with status 0 and leaves nothing behind."""

    def __init__(
        self,
        *flags: str,
        log: Path,
        environ: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        module: Sequence[str] = ("novainfer.entrypoints.cli",),
        leads_group: bool = False,
    ) -> None:
        """Start with these flags on a free port and wait until it is ready.

        `prefix` is a command that runs the server as its only child, somewhere else. `module`: what Python runs, and
        its first arguments. `leads_group`: the server's process group has its pid, and nobody of ours is in it.
        """
        command = [*prefix, sys.executable, "-m", *module, "serve", "--port", "0", *flags]
        self._log = log
        self._is_child = bool(prefix)
        self._lines: list[str] = []
        self._is_ready = threading.Event()
        with open(log, "w", encoding="utf-8") as errors:
            self._temporary = Path(tempfile.mkdtemp(prefix="n"))  # short: Ray's sockets lie below it
            temporary = {} if prefix else {"TMPDIR": str(self._temporary)}  # somewhere else it does not exist
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**(os.environ if environ is None else environ), **temporary},
                process_group=0 if leads_group else None,
            )
        self._reader = threading.Thread(target=self._read, name="server-output")
        self._reader.start()
        self.base_url = ""
        try:
            self._wait_ready()
        except BaseException:
            self.kill()
            raise

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The supervisor's."""
        return psutil.Process(self.process.pid).children()[0].pid if self._is_child else self.process.pid

    @property
    def errors(self) -> str:
        """All that was written to standard error so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def processes(self) -> dict[str, psutil.Process]:
        """Our processes by title, e.g. "supervisor", "gateway 0", "scheduler 0", "worker 0.1".

        Not Ray's, nor standbys: these come when there is time.
        """
        found, titles = {}, {}  # parents come before their children
        for process in self.tree():
            try:
                title, parent = " ".join(process.cmdline()).strip("\0 "), process.ppid()
            except psutil.NoSuchProcess:  # it has just ended
                continue
            titles[process.pid] = title
            is_new = titles.get(parent) == title  # just forked, and not yet what it is going to be
            if title.startswith("novainfer: ") and not title.startswith("novainfer: standby") and not is_new:
                found[title.removeprefix("novainfer: ")] = process
        return found

    def tree(self) -> list[psutil.Process]:
        """The supervisor and everything below it."""
        supervisor = psutil.Process(self.pid)
        return [supervisor, *supervisor.children(recursive=True)]

    def sdk(self, api_key: str = "none", *, max_retries: int = 0) -> openai.OpenAI:
        """An OpenAI client that ignores proxies; close it."""
        return openai.OpenAI(
            base_url=f"{self.base_url}/v1",
            api_key=api_key,
            max_retries=max_retries,
            http_client=openai.DefaultHttpxClient(trust_env=False, verify=False),
        )

    def http(self, **headers: str) -> httpx.Client:
        """A plain client that ignores proxies; close it. Without certificates to load it is cheap to make."""
        return httpx.Client(base_url=self.base_url, trust_env=False, verify=False, timeout=120.0, headers=headers)

    def metric(self, name: str) -> float:
        """The value of a metric that has one."""
        with self.http() as http:
            return _metrics(http, (name,))[name]

    def wait_until_ready(self) -> None:
        """Block until `/readyz` says so, after something has been replaced."""
        with self.http() as http:
            while not _is_ready(http):
                assert self.process.poll() is None, self.errors
                time.sleep(PAUSE)

    def wait_until_nothing_is_held(self) -> None:
        """Block until a report of the engine says that everything is free; they come several times a second."""
        deadline = time.monotonic() + 60
        with self.http() as http:
            while any((held := _metrics(http, _HELD)).values()) and time.monotonic() < deadline:
                time.sleep(PAUSE)
        assert not any(held.values()), held

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        """Whoever does not stop it has it killed."""
        if self.process.poll() is None:
            self.kill()
        self._remove_temporary()

    # -- its end ------------------------------------------------------------------------------------------------

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it in an orderly way."""
        tree = self.tree()
        os.kill(self.pid, number)
        try:
            status = self.wait()
            assert status == 0, f"exit status {status}; standard error:\n{self.errors}"
            assert_gone(tree)
            left = sorted(path.name for path in self._temporary.iterdir())
            assert not left, f"left in the temporary directory: {left}"
        finally:
            self._remove_temporary()

    def wait(self) -> int:
        """The exit status, once it has ended by itself."""
        status = self.process.wait(STOP_PATIENCE)
        self._reader.join(STOP_PATIENCE)
        return status

    def kill(self) -> None:
        """End it at once; for the clean-up of failed tests. Its children die with it."""
        tree = self.tree() if self.process.poll() is None else []
        if tree:
            tree[0].kill()
        self.wait()
        assert_gone(tree)
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _wait_ready(self) -> None:
        if not self._is_ready.wait(START_PATIENCE) or not self.base_url:
            raise AssertionError(f"the server did not get ready; standard error:\n{self.errors}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            match = READY.search(line)
            if match:
                self.base_url = match.group(1)
                self._is_ready.set()
        self._is_ready.set()  # it ended: nobody may wait any longer
        self.process.stdout.close()


def _metrics(http: httpx.Client, names: Sequence[str]) -> dict[str, float]:
    """The first value of each of these metrics."""
    found: dict[str, float] = {}
    for line in http.get("/metrics").text.splitlines():
        name, _, value = line.replace("{", " ", 1).partition(" ")
        if name in names:
            found.setdefault(name, float(value.rsplit(" ", 1)[-1]))
    assert len(found) == len(names), f"no metric {set(names) - found.keys()}"
    return found


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:  # a gateway is being replaced
        return False


def assert_gone(processes: list[psutil.Process]) -> None:
    """All of them have ended, or do so within seconds."""
    _, alive = psutil.wait_procs(processes, timeout=20)
    left = []
    for process in alive:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                left.append(process.cmdline())
        except psutil.NoSuchProcess:
            continue
    assert not left, f"left behind: {left}"
