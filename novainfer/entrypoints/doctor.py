"""`novainfer doctor`: would this configuration run on this machine, and if not, what to do about it."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement

from novainfer.checkpoint import check_model, read_json, resolve_checkpoint
from novainfer.config import MIB, ServeConfig, check
from novainfer.entrypoints.options import resolve
from novainfer.entrypoints.serve import held_port
from novainfer.errors import ConfigError
from novainfer.transport.addresses import RunDir, check_space

OK, WARN, FAIL = "ok", "warn", "FAIL"
_GIB = 1024**3
_ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding; `fix` says what to do unless the status is ok."""

    subject: str
    status: str
    finding: str
    fix: str = ""


def doctor_command(arguments: argparse.Namespace) -> int:
    """Print every verdict; 1 if any of them means that serving would fail."""
    config = resolve(arguments, os.environ).config
    check(config)
    verdicts = [_guarded(examine, config) for examine in CHECKS]
    if arguments.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts], indent=2))
    else:
        for verdict in verdicts:
            print(f"{verdict.status:>4}  {verdict.subject}: {verdict.finding}")
            if verdict.fix:
                print(f"      fix: {verdict.fix}")
    return 1 if any(verdict.status == FAIL for verdict in verdicts) else 0


def _guarded(examine: Callable[[ServeConfig], Verdict], config: ServeConfig) -> Verdict:
    try:
        return examine(config)
    except Exception as error:  # a broken installation raises anything; the doctor must go on
        return Verdict(examine.__name__.replace("_", " "), FAIL, f"{type(error).__name__}: {error}", "see the error")


def python(config: ServeConfig) -> Verdict:
    """The interpreter; an older one than 3.11 could not have loaded this file."""
    return Verdict("python", OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def packages(config: ServeConfig) -> Verdict:
    """Every package that is needed against the versions that will do: older ones have known flaws."""
    try:
        wanted = [Requirement(line) for line in importlib.metadata.requires("novainfer") or ()]
    except importlib.metadata.PackageNotFoundError:
        return Verdict("packages", WARN, "NovaInfer is not installed as a package", "pip install . (in its folder)")
    wanted = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    versions = {one.name: importlib.metadata.version(one.name) for one in wanted}
    wrong = [one for one in wanted if not one.specifier.contains(versions[one.name], prereleases=True)]
    if wrong:
        finding = ", ".join(f"{one.name} {versions[one.name]}" for one in wrong)
        return Verdict("packages", FAIL, finding, "pip install " + " ".join(f"'{one}'" for one in wrong))
    return Verdict("packages", OK, f"all {len(wanted)} are new enough")


def torch(config: ServeConfig) -> Verdict:
    """PyTorch's version."""
    version = importlib.metadata.version("torch")
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not (2, 11) <= release < (2, 14):
        return Verdict("torch", FAIL, version, "install torch 2.11 to 2.13: pip install 'torch>=2.11,<2.14'")
    return Verdict("torch", OK, version)


def device(config: ServeConfig) -> Verdict:
    """GPUs, as torch sees them."""
    torch = importlib.import_module("torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
    wanted = config.parallel
    if wanted.device == "cuda" and count == 0:
        return Verdict(
            "device", FAIL, "no CUDA device", "install the NVIDIA driver and a CUDA build of torch, or --device cpu"
        )
    if count and wanted.device != "cpu" and wanted.tensor_parallel_size > count and wanted.ray_address is None:
        fix = f"use --tensor-parallel-size {count}, or join a cluster with --ray-address"
        return Verdict("device", FAIL, f"{count} GPU(s) for {wanted.tensor_parallel_size} ranks", fix)
    return Verdict("device", OK, f"{count} x {names}" if count else "CPU")


def compiler(config: ServeConfig) -> Verdict:
    """For the native CPU kernels."""
    found = next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name and (path := shutil.which(name))),
        None,
    )
    if found is None:
        return Verdict(
            "compiler", WARN, "no C++ compiler", "install g++ (or set CXX): without it CPU kernels run in slow torch"
        )
    return Verdict("compiler", OK, found)


def processor(config: ServeConfig) -> Verdict:
    """Cores that this process may use, and the vector instructions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    finding = f"{cores} core(s); {' '.join(_isa()) or 'no known vector instructions'}"
    if cores < config.parallel.tensor_parallel_size and config.parallel.device == "cpu":
        return Verdict("processor", WARN, finding, "use at most as many ranks as cores: more are slower")
    return Verdict("processor", OK, finding)


def memory(config: ServeConfig) -> Verdict:
    """Main memory against the size of the weights, and what a token of context takes beside them."""
    psutil = importlib.import_module("psutil")
    free = psutil.virtual_memory().available
    weights = _weights_bytes(config)
    finding = f"{free / _GIB:.1f} GiB available, the weights have {weights / _GIB:.2f} GiB"
    if per_token := _kv_token_bytes(config):
        finding += f", 1000 tokens of the KV cache about {1000 * per_token / MIB:.1f} MiB"
    is_quantized = config.model.quantization != "none"  # then at most half of 16 bits, but for the embedding
    if weights > free * (2 if is_quantized else 1):
        fix = "free memory, or choose a smaller model or type (--dtype bfloat16, --quantization int8)"
        return Verdict("memory", FAIL, finding, fix)
    if free < 2 * _GIB:
        return Verdict("memory", WARN, finding, "Ray and torch alone take about 1.5 GiB")
    return Verdict("memory", OK, finding)


def port(config: ServeConfig) -> Verdict:
    """Whether the HTTP port is free."""
    try:
        with held_port(config) as held:
            free = held.server.port
    except ConfigError as error:
        return Verdict("port", FAIL, str(error), "stop what listens there, or choose another --port")
    return Verdict("port", OK, f"{config.server.host}:{free} is free")


def run_directory(config: ServeConfig) -> Verdict:
    """Whether sockets and files can be made where they will lie."""
    try:
        parent = Path(config.server.run_dir or tempfile.gettempdir())
        check_space(parent)
        RunDir(parent / "novainfer-12345678").supervisor().check()
    except ConfigError as error:
        return Verdict("run directory", FAIL, str(error), "choose another --run-dir (or TMPDIR)")
    return Verdict("run directory", OK, str(parent))


def ray(config: ServeConfig) -> Verdict:
    """Ray's version, and room for its object store."""
    version = importlib.metadata.version("ray")
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 56):
        return Verdict("ray", FAIL, version, "install ray 2.56 or newer")
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free < 128 * 1024**2:
        return Verdict("ray", WARN, f"{version}; /dev/shm is almost full", "give a container --shm-size=1g")
    return Verdict("ray", OK, version)


def model(config: ServeConfig) -> Verdict:
    """Whether the checkpoint is there and readable."""
    try:
        folder = check_model(config.model)
    except ConfigError as error:
        return Verdict("model", FAIL, str(error), "give a checkpoint folder, a hub id that can be reached, or 'demo'")
    missing = [name for name in ("config.json", "tokenizer.json") if not os.access(folder / name, os.R_OK)]
    if missing:
        return Verdict(
            "model", FAIL, f"{folder} has no readable {', '.join(missing)}", "complete the checkpoint folder"
        )
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", "unknown type")
    if folder.is_dir() and not list(folder.glob("*.safetensors")) and Path(config.model.model).is_dir():
        return Verdict("model", FAIL, f"{folder} has no safetensors", "convert the weights to safetensors")
    return Verdict("model", OK, f"{folder} ({kind})")


def _weights_bytes(config: ServeConfig) -> int:
    try:
        folder = resolve_checkpoint(config.model.model, revision=config.model.revision)
    except ConfigError:
        return 0  # `model` reports it
    return sum(path.stat().st_size + _float8_bytes(path) for path in folder.glob("*.safetensors"))


def _float8_bytes(path: Path) -> int:
    """Of the numbers of 8 bits in a file, which become twice as large in memory; 0 where it cannot be read."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        ends = [entry["data_offsets"] for entry in header.values() if str(entry.get("dtype", "")).startswith("F8_")]
        return sum(end - start for start, end in ends)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, MemoryError, OverflowError):
        return 0  # `model`, or the workers, report it


def _kv_token_bytes(config: ServeConfig) -> int:
    """What keys and values of a token take over all ranks; 0 where the checkpoint does not tell."""
    try:
        folder = resolve_checkpoint(config.model.model, revision=config.model.revision)
        data = read_json(folder / "config.json")
        sizes = data | data.get("text_config", {})
        heads = sizes["num_attention_heads"]
        dim = int(sizes.get("head_dim") or sizes["hidden_size"] // heads)
        vectors = 2 * int(sizes["num_hidden_layers"]) * int(sizes.get("num_key_value_heads") or heads)
    except (ConfigError, KeyError, TypeError):
        return 0  # `model` reports what is wrong with it; some have heads for each layer
    if config.cache.kv_cache_dtype == "int8":
        return vectors * (dim + 4)  # a scale in float32 for each
    if config.cache.kv_cache_dtype == "fp8":
        return vectors * dim
    dtype = config.model.dtype if config.model.dtype != "auto" else sizes.get("dtype") or sizes.get("torch_dtype")
    return vectors * dim * (2 if dtype in ("float16", "bfloat16") else 4)


def _isa() -> list[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return []
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            present = set(line.split(":", 1)[1].split())
            return [flag for flag in _ISA_FLAGS if flag in present]
    return []


CHECKS: tuple[Callable[[ServeConfig], Verdict], ...] = (
    python,
    packages,
    torch,
    device,
    compiler,
    processor,
    memory,
    port,
    run_directory,
    ray,
    model,
)
