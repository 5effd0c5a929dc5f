"""llama.cpp's converter for a checkpoint whose tokenizer it has never seen.

`python -m bench.peers.gguf_convert SOURCES CHECKPOINT [options of convert_hf_to_gguf.py]`. The converter knows a
tokenizer's way of splitting text by a hash of what it makes of one text, and gives up on others. Ours splits as
GPT-2's does.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


def main() -> None:
    """Convert, with GPT-2's splitting where the converter knows none."""
    sources, *arguments = sys.argv[1:]
    sys.path.insert(0, sources)
    model: Any = importlib.import_module("conversion.base").TextModel
    known = model.get_vocab_base_pre

    def known_or_gpt2(self: object, tokenizer: object) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    model.get_vocab_base_pre = known_or_gpt2
    if importlib.util.find_spec("sentencepiece") is None:
        stand_in: Any = ModuleType("sentencepiece")
        stand_in.SentencePieceProcessor = None
        sys.modules["sentencepiece"] = stand_in
    converter: Any = importlib.import_module("convert_hf_to_gguf")
    sys.argv = [f"{sources}/convert_hf_to_gguf.py", *arguments]
    converter.main()


if __name__ == "__main__":
    main()
