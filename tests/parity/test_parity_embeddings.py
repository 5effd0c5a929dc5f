"""Embeddings against transformers: the hidden state after the final norm of each prompt's last token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from novainfer import LLM
from novainfer.errors import InvalidRequestError
from tests.parity.builders import FAMILIES, FOREIGN_FAMILIES, auto_class
from tests.parity.harness import one_thread, ragged_prompts
from workers.checkpoint import read_json

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
Build = Callable[[str], Path]


def hidden_states(folder: Path) -> list[Tensor]:
    """transformers' own, of each prompt by itself."""
    kind = read_json(folder, "config.json")["model_type"]
    model = auto_class(kind).from_pretrained(folder, attn_implementation="eager").eval()
    with one_thread(), torch.inference_mode():
        return [
            model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, -1].float()
            for prompt in ragged_prompts()
        ]


@pytest.mark.parametrize("name", [*FAMILIES, *FOREIGN_FAMILIES])
def test_family_given_ragged_prompts_when_embedded_then_equals_transformers(name: str, checkpoint: Build) -> None:
    expected = hidden_states(checkpoint(name))
    with LLM(str(checkpoint(name)), num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64) as llm:
        plain = llm.embed(ragged_prompts(), use_tqdm=False, normalize=False)
        unit = llm.embed(ragged_prompts(), use_tqdm=False)
    for raw, normalised, theirs in zip(plain, unit, expected, strict=True):
        assert torch.tensor(raw["embedding"]).allclose(theirs, rtol=TOLERANCE, atol=TOLERANCE)
        assert torch.tensor(normalised["embedding"]).allclose(normalize(theirs, dim=0), rtol=0, atol=TOLERANCE)


def test_checkpoint_given_files_of_sentence_transformers_when_embedded_then_they_are_followed(
    checkpoint: Build, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in checkpoint("qwen3").iterdir():
        (folder / path.name).symlink_to(path)
    kinds = ["Transformer", "Pooling"]
    modules = [
        {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}))
    expected = hidden_states(folder)[3]
    with LLM(str(folder), num_blocks=64, max_num_seqs=8) as llm:
        (result,) = llm.embed([ragged_prompts()[3]], use_tqdm=False, dimensions=5)
    assert torch.tensor(result["embedding"]).allclose(expected[:5], rtol=TOLERANCE, atol=TOLERANCE)
    pooling.write_text(json.dumps({"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}))
    with LLM(str(folder), num_blocks=64, max_num_seqs=8) as llm:
        with pytest.raises(InvalidRequestError, match="mean_tokens"):
            llm.embed("a", use_tqdm=False)
        assert llm.generate("a", use_tqdm=False)[0]["token_ids"]
