"""Compute kernels behind one interface, `kernels.backend.KernelBackend`: plain torch, Triton, native CPU
code.

This package imports nothing else of the project, and importing it loads neither torch nor triton. Its name
is also that of a Hugging Face package which transformers probes for with `importlib.metadata`;
`__version__` keeps such a probe harmless.
"""

from __future__ import annotations

__version__ = "0.1.0"
