"""Tensor-parallel groups on one local Ray instance, which outlives them: a start of Ray costs more than a group.

`run_groups` is the life of a process of its own, because Ray reads its environment once in a process.
`python -m tests.parity.ray_groups NUM_CPUS` is the instance: it prints its address and ends with its standard input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from novainfer import LLM, SamplingParams
from tests.parity.harness import NUM_TOKENS, Generation, ragged_prompts

ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # it listens on loopback alone ...
    "RAY_AUTH_MODE": "disabled",  # ... so that nobody needs a token, which Ray would keep in the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
}


def run_groups(folders: dict[str, str], world_size: int, out: str) -> None:
    """Generate with each checkpoint on a group of its own; what came of it goes to `out`/NAME.json."""
    os.environ.update(ENVIRONMENT)
    with local_ray(world_size) as address:
        for name, folder in folders.items():
            generation = ray_greedy(folder, world_size, address)
            Path(out, f"{name}.json").write_text(json.dumps(asdict(generation)))


def ray_greedy(folder: str, world_size: int, address: str) -> Generation:
    """The answer of the whole engine with its ranks on the Ray instance at `address`."""
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    placement = {"tensor_parallel_size": world_size, "ray_address": address, "device": "cpu", "threads_per_worker": 1}
    limits = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    with LLM(folder, executor="ray", **placement, **limits) as llm:
        results = llm.generate(ragged_prompts(), greedy, use_tqdm=False)
    return Generation(
        [result["token_ids"] for result in results],
        [[entry["logprob"] for entry in result["logprobs"]] for result in results],
    )


@contextmanager
def local_ray(num_cpus: int) -> Iterator[str]:
    """The address of a Ray instance that ends with the block, or with this process."""
    command = [sys.executable, "-m", "tests.parity.ray_groups", str(num_cpus)]
    host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    try:
        yield host.stdout.readline().strip()
    finally:
        host.communicate()


def main() -> None:
    """Be the instance."""
    import ray

    with tempfile.TemporaryDirectory(prefix="nova-", ignore_cleanup_errors=True) as folder:
        context = ray.init(
            address="local",
            num_cpus=int(sys.argv[1]),
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        print(context.address_info["gcs_address"], flush=True)
        sys.stdin.read()
        ray.shutdown()


if __name__ == "__main__":
    main()
