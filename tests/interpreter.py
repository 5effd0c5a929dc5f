"""Triton's interpreter without its largest waste; `python -m tests.interpreter MODULE ...` runs a module with that.

Before each call of a function inside a kernel it looks through all of Triton's language for what it has to replace,
though the launch has replaced it already: that took half of its time. A Triton that has other names for these parts
stays as it is.
"""

from __future__ import annotations

import inspect
import runpy
import sys
from typing import Any

_PARTS = (
    *("_LangPatchScope", "_get_np_dtype", "_patch_attr", "_patch_lang", "_patch_lang_core", "_patch_lang_tensor"),
    "interpreter_builder",
)


def quicken() -> None:
    """What a launch replaces is looked up once in a process, and replaced once in a launch."""
    import triton.language as tl
    from triton.runtime import interpreter

    if hasattr(interpreter, "_is_quick") or not all(hasattr(interpreter, name) for name in _PARTS):
        return
    interpreter._is_quick = True
    packages = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    builtins = {
        package: [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
        for package in packages
    }

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    class Launch(interpreter._LangPatchScope):  # type: ignore[misc]
        """Of all that is replaced, whatever the kernel's module has of it: what it calls may have more."""

        running: Launch | None = None

        def __init__(self) -> None:
            super().__init__()
            for language in (tl, tl.core):
                patch_builtin(language, interpreter.interpreter_builder, self)
                interpreter._patch_lang_core(language, self)
            for package in (tl.tensor, tl.math, tl.core.tensor_descriptor_base):
                patch_builtin(package, interpreter.interpreter_builder, self)
            interpreter._patch_lang_tensor(tl.tensor, self)
            Launch.running = self

        def restore(self) -> None:
            super().restore()
            Launch.running = None

    slow, scalars = interpreter._get_np_dtype, dict[str, Any]()

    def numpys(kind: Any) -> Any:
        scalar = kind.scalar
        if scalar.is_ptr():
            return slow(scalar)
        if scalar.name not in scalars:
            scalars[scalar.name] = slow(scalar)
        return scalars[scalar.name]

    interpreter._patch_lang = lambda function: Launch.running or Launch()
    interpreter._get_np_dtype = numpys


def main() -> None:
    """Run the module that is named, as `python -m` would."""
    quicken()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
