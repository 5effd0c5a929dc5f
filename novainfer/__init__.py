"""NovaInfer: a distributed LLM server whose tokens depend on the request alone.

`LLM` and `SamplingParams` are the offline interface; importing this package loads neither torch nor ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from novainfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from novainfer.entrypoints.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """`LLM` is loaded on first use, because it needs torch and this package must not."""
    if name == "LLM":
        from novainfer.entrypoints.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
