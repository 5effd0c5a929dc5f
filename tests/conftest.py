"""Set-up shared by all tests: no network, no proxies, Triton's interpreter where there is no GPU."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for a GPU must not initialise it: tests start processes
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # two groups of tests share the cores: who waits shall not spin
for _name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
    os.environ.pop(_name, None)
    os.environ.pop(_name.upper(), None)
for _name in [name for name in os.environ if name.startswith("NOVAINFER_") and name != "NOVAINFER_CACHE_DIR"]:
    del os.environ[_name]

import psutil  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.interpreter import quicken  # noqa: E402
from tests.servers import RunningServer  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in every run and no file left behind; a failing example is printed with the test. How fast they are
# drawn depends on the machine.
settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

REPOSITORY = Path(__file__).resolve().parent.parent
LONGEST_FIRST = ("chaos", "parity", "exactness", "safety", "online")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of our own."""
    parser.addoption("--model-path", help="checkpoint folder for the tests marked hf (default: the demo model)")


def pytest_configure(config: pytest.Config) -> None:
    """Markers that go with our options."""
    config.addinivalue_line("markers", "hf: compared with transformers on the checkpoint of --model-path")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that two workers end at about the same time."""
    items.sort(
        key=lambda item: LONGEST_FIRST.index(folder) if (folder := item.path.parent.name) in LONGEST_FIRST else 9
    )


@pytest.fixture(scope="session")
def model_path(pytestconfig: pytest.Config) -> Path:
    """The real checkpoint to test with."""
    given = pytestconfig.getoption("--model-path")
    return Path(given) if given else REPOSITORY / "novainfer" / "assets" / "demo"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The demo model, served with the default options; shared by all tests that only send requests."""
    running = RunningServer(log=tmp_path_factory.mktemp("server") / "log")
    yield running
    running.stop()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts servers with given flags; those that still run at the end of the test are stopped."""
    servers: list[RunningServer] = []

    def start(*flags: str, leads_group: bool = False) -> RunningServer:
        log = tmp_path / f"server-{len(servers)}.log"
        servers.append(RunningServer(*flags, log=log, leads_group=leads_group))
        return servers[-1]

    yield start
    for running in servers:
        with running:  # one that ended by itself is cleaned up too
            if running.process.poll() is None:
                running.stop()


@pytest.fixture
def _no_collection() -> Iterator[None]:
    """Only what nobody refers to is freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _triton_is_quick() -> None:
    if "triton.runtime.interpreter" in sys.modules and not torch.cuda.is_available():
        quicken()


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=5)
    left = [process.cmdline() for process in alive if process.is_running() and not _is_interpreters_own(process)]
    assert not left, "processes outlived the tests"


def _is_interpreters_own(process: psutil.Process) -> bool:
    """multiprocessing keeps a resource tracker (or fork server) until the interpreter ends."""
    try:
        return "multiprocessing" in " ".join(process.cmdline())
    except psutil.Error:
        return True
