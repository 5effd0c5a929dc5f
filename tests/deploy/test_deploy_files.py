"""The images and the unit, read as text: a container engine is not needed."""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from novainfer.config import ServerConfig
from novainfer.entrypoints.options import OPTIONS, OTHER_VARIABLES
from novainfer.entrypoints.supervisor import DRAIN_MARGIN, STOP_TIMEOUT, WORKERS_TIMEOUT

pytestmark = pytest.mark.unit

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
HEAVY = {"torch", "triton", "ray", "transformers"}


def instructions(path: Path) -> list[tuple[str, str]]:
    """(keyword, rest) with continued lines joined and comments dropped."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], " ".join(line.split()[1:])) for line in text.splitlines() if line.strip()]


def values(path: Path, keyword: str) -> list[str]:
    return [rest for name, rest in instructions(path) if name == keyword]


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "novainfer.service", encoding="utf-8")
    return parser


def package_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=;\s\[]", line.strip())[0].lower() for line in requirements}


def test_the_images_when_listed_then_there_are_three() -> None:
    assert [path.suffix for path in DOCKERFILES] == [".cpu", ".gateway", ".gpu"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_when_built_then_in_two_stages_and_run_as_user_1000_in_exec_form(path: Path) -> None:
    assert len(values(path, "FROM")) == 2
    assert values(path, "USER") == ["1000:1000"]
    last_stage = [name for name, _ in instructions(path)]
    assert last_stage.index("USER") > max(
        index for index, name in enumerate(last_stage) if name in ("FROM", "RUN", "COPY")
    )
    for keyword in ("ENTRYPOINT", "CMD"):
        assert all(value.startswith('["') for value in values(path, keyword))
    assert len(values(path, "ENTRYPOINT")) == 1
    health = values(path, "HEALTHCHECK")
    assert len(health) == 1
    assert "/livez" in health[0]
    assert 'CMD ["' in health[0]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_when_built_then_it_pins_its_base_and_holds_no_secret(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    base = re.search(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert base is not None
    assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", base.group(1))
    assert not re.search(r"(api_?key|token|password|secret)\s*=", text, re.IGNORECASE)
    assert "COPY . " not in text, "a whole checkout may hold anything"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_when_it_sets_our_variables_and_flags_then_they_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"NOVAINFER_\w+", text)) <= set(OTHER_VARIABLES)
    flags = re.findall(r'"(--[a-z-]+)"', " ".join(values(path, "CMD")))
    known = {option.flag for option in OPTIONS.values()} | {"--index"}
    assert set(flags) <= known


def test_the_cpu_image_when_run_then_its_kernels_are_found_wherever_its_cache_is_put() -> None:
    """Charts put the cache on a volume, and the image has no compiler."""
    build, last = [one.split("\nFROM ")[0] for one in (DEPLOY / "Dockerfile.cpu").read_text().split("\nFROM ")[1:]]
    cache = re.search(r"^ENV NOVAINFER_CACHE_DIR=(\S+)\nRUN python -m kernels.native.build", build, re.MULTILINE)
    assert cache is not None
    assert f"NOVAINFER_KERNEL_DIR={cache[1]}/native" in last
    assert "g++" not in last


def test_every_path_that_an_image_copies_when_looked_up_then_it_exists() -> None:
    for path in DOCKERFILES:
        for value in values(path, "COPY"):
            if value.startswith("--from"):
                continue
            for source in value.split()[:-1]:
                assert (REPOSITORY / source).exists(), f"{path.name} copies {source}"


def test_the_gateways_requirements_when_read_then_they_are_ours_without_the_heavy_ones() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (DEPLOY / "requirements-gateway.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert set(wanted) <= set(project["dependencies"])
    assert not package_names(wanted) & HEAVY
    assert "torch" not in (DEPLOY / "Dockerfile.gateway").read_text(encoding="utf-8").split("FROM", 1)[1].replace(
        "without torch", ""
    )


def imported_modules(path: Path) -> Iterator[str]:
    """What a module imports as it is imported itself; of `from a import b` both `a` and `a.b`."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
            waiting.append(node)


def foreign_imports(*modules: str) -> set[str]:
    """The packages of others that these modules of ours import, and those that they import, and so on."""
    seen: set[str] = set()
    foreign: set[str] = set()
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        path = REPOSITORY / name.replace(".", "/")
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if (REPOSITORY / name.split(".")[0]).is_dir():
            waiting += [*imported_modules(source), *name.rpartition(".")[:1]] if source.exists() else []
        elif name and name.split(".")[0] not in sys.stdlib_module_names:
            foreign.add(name.split(".")[0])
    return foreign


def test_the_gateways_requirements_when_its_processes_start_then_they_are_all_that_these_import() -> None:
    """Its image installs our package without what that needs by itself."""
    found = foreign_imports("gateway.process", "gateway.text_child")
    assert {"zmq", "psutil", "pydantic"} <= found
    owners = packages_distributions()
    needed = {owners[name][0].lower().replace("_", "-") for name in found} - {"pydantic-core"}  # comes with pydantic
    lines = (DEPLOY / "requirements-gateway.txt").read_text(encoding="utf-8").splitlines()
    assert needed <= package_names([line for line in lines if line and not line.startswith("#")])


def test_the_unit_when_the_server_stops_then_systemd_waits_longer_than_the_supervisor() -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["KillMode"] == "mixed"
    longest = ServerConfig().drain_timeout + DRAIN_MARGIN + STOP_TIMEOUT + WORKERS_TIMEOUT
    assert float(service["TimeoutStopSec"]) > longest
    assert float(service["TimeoutStartSec"]) > ServerConfig().start_timeout
    assert service["Restart"] == "on-failure"
    assert 10 <= float(service["WatchdogSec"]) <= 60
    assert service["RuntimeDirectoryMode"] == "0700"


def test_the_unit_when_systemd_reads_it_then_it_has_no_complaint(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        assert unit().sections() == ["Unit", "Service", "Install"]
        return
    # verify wants the program to exist
    text = (DEPLOY / "novainfer.service").read_text(encoding="utf-8")
    copy = tmp_path / "novainfer.service"
    copy.write_text(text.replace("/opt/novainfer/bin/novainfer", "/bin/true"), encoding="utf-8")
    done = subprocess.run([tool, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if "novainfer" in line]
    assert not complaints, complaints


@pytest.mark.parametrize("path", [*DOCKERFILES, REPOSITORY / "Makefile"], ids=lambda path: path.name)
def test_an_image_when_it_installs_packages_then_from_one_index(path: Path) -> None:
    """With two, whoever takes a package's name at the other one is installed."""
    text = path.read_text(encoding="utf-8")
    assert "pip install" in text
    assert not re.search(r"extra[-_]index|index-strategy|unsafe-best-match", text, re.IGNORECASE)
