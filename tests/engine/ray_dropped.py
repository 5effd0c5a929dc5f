"""A process of its own for the tests of Ray: offline engines that nobody ends; says what becomes of them.

argv: how the last one goes: 'left' (Python ends with it) or 'dropped'.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import psutil

from novainfer import LLM, SamplingParams
from novainfer.errors import ConfigError
from novainfer.executor.zmq_executor import ZmqExecutor

OPTIONS = {"executor": "ray", "device": "cpu", "num_blocks": 16, "max_model_len": 64, "max_num_seqs": 2}
LEFT: list[LLM] = []


def traces() -> tuple[int, int]:
    """How many processes and run directories there are of ours."""
    children = psutil.Process().children(recursive=True)
    return len(children), len(list(Path(tempfile.gettempdir()).glob("novainfer-*")))


def answer(llm: LLM) -> str:
    """Some greedy text."""
    return str(llm.generate("What", SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)[0]["text"])


def main() -> None:
    """Run the lives described above."""
    llm = LLM("demo", **OPTIONS)
    first = answer(llm)
    del llm
    gc.collect()
    print("dropped", *traces(), flush=True)
    llm = LLM("demo", **OPTIONS)
    try:
        LLM("demo", **OPTIONS)
    except ConfigError as error:
        print(error, flush=True)
    print("the same text:", answer(llm) == first, flush=True)
    with patch.object(ZmqExecutor, "collect", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
        answer(llm)  # a step is out
    print("after Ctrl-C:", answer(llm) == first, flush=True)
    if sys.argv[1] == "left":
        LEFT.append(llm)


if __name__ == "__main__":
    main()
