"""What a model that thinks and calls tools is asked in tests, and what it says; see `tests.fakes.write_thinker`."""

from __future__ import annotations

from typing import Any

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
THOUGHT = "<think>\nHello? <tool_call>\n</think>\n\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"city":  "Zürich 🎉", "n": [1]}}\n</tool_call>'
ARGUMENTS = '{"city":  "Zürich 🎉", "n": [1]}'
OTHER = '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
TEXT = f"{THOUGHT}Let me look.\n\n{CALL}{OTHER}"
