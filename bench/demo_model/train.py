"""Train the demo model from nothing: `python -m bench.demo_model.train --out DIR [--seed 0]`.

The same seed, machine, library versions, number of threads and type give the same bits, also when the run is
interrupted and resumed from one of its saved states.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3ForCausalLM

from bench.demo_model.data import Batch, batches
from bench.demo_model.evaluate import evaluate
from bench.demo_model.model import new_model, save_model
from bench.demo_model.muon import Muon
from bench.demo_model.tokenizer import train_tokenizer
from kernels.native.build import supported_isas

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long and how fast to train. A step sees 3,840 tokens in short packs, 4,096 in long ones."""

    steps: int = 2800
    long_steps: int = 200  # the last steps use long conversations
    warmup_steps: int = 40
    decay_share: float = 0.4  # of the steps, at the end, in which the rate falls to nothing
    matrix_rate: float = 6e-4  # Muon's, for the matrices inside the layers
    adam_rate: float = 3e-3  # AdamW's, for the embedding and the norms
    weight_decay: float = 0.1
    short: tuple[int, int] = (10, 384)  # packs per step, tokens per pack
    long: tuple[int, int] = (4, 1024)


def rate(step: int, plan: Plan) -> float:
    """The share of the full learning rate: a linear start, a plateau, a linear end."""
    start = min(1.0, (step + 1) / plan.warmup_steps)
    end = (plan.steps - step) / (plan.steps * plan.decay_share)
    return min(start, end, 1.0)


class Trainer:
    """The model, its two optimizers, and their state on disk."""

    def __init__(self, model: Qwen3ForCausalLM, plan: Plan, dtype: torch.dtype) -> None:
        """Muon takes the matrices inside the layers, AdamW the embedding and the norms. Products are in `dtype`."""
        self.model, self.plan, self._dtype = model, plan, dtype
        inner = {name: p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name}
        outer = {name: p for name, p in model.named_parameters() if name not in inner}
        self._outer = list(outer.values())
        self._muon = Muon(list(inner.values()), dtype, weight_decay=plan.weight_decay)
        self._adam = torch.optim.AdamW(self._outer, betas=(0.9, 0.98), weight_decay=0.0)
        self._hidden: Callable[[Tensor, Tensor], Tensor] = torch.compile(self._forward, dynamic=False)

    def _forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.model.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return hidden

    def step(self, number: int, batch: Batch) -> float:
        """One update; gives the mean loss over the tokens that count."""
        with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
            hidden = self._hidden(batch.ids, batch.attention_mask())[:, :-1]
            counts = batch.counts[:, 1:]  # logits only where they are needed: a third of the places
            logits = self.model.lm_head(hidden[counts])
        loss = cross_entropy(logits.float(), batch.ids[:, 1:][counts])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._outer, 1.0)
        share = rate(number, self.plan)
        self._muon.step(self.plan.matrix_rate * share)
        self._adam.param_groups[0]["lr"] = self.plan.adam_rate * share
        self._adam.step()
        self.model.zero_grad(set_to_none=True)
        return float(loss.detach())

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name."""
        tensors = {f"weight.{name}": p.detach() for name, p in self.model.named_parameters()}
        tensors |= {f"momentum.{i}": momentum for i, momentum in enumerate(self._muon.momenta)}
        for i, slots in self._adam.state_dict()["state"].items():
            tensors |= {f"adam.{i}.{slot}": value for slot, value in slots.items()}
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state` gave."""
        adam = self._adam.state_dict()
        for key, value in tensors.items():
            part, _, name = key.partition(".")
            if part == "weight":
                self.model.get_parameter(name).data.copy_(value)
            elif part == "momentum":
                self._muon.momenta[int(name)].copy_(value)
            else:
                index, slot = name.split(".")
                adam["state"].setdefault(int(index), {})[slot] = value
        self._adam.load_state_dict(adam)


def _batches(tokenizer: Tokenizer, seed: int, plan: Plan, first: int) -> Iterator[Batch]:
    """The batches of the steps from `first` on."""
    turn = plan.steps - plan.long_steps
    short = batches(tokenizer, seed + 1, *plan.short)
    long = batches(tokenizer, seed + 2, *plan.long, long=True)
    yield from islice(short, min(first, turn), turn)
    yield from islice(long, max(0, first - turn), plan.long_steps)


def train(out: Path, seed: int, plan: Plan, dtype: torch.dtype, save_every: int, resume: int) -> None:
    """Train and write the checkpoint to `out`, and every `save_every` steps an early one with its state."""
    tokenizer = train_tokenizer(seed)
    trainer = Trainer(new_model(seed), plan, dtype)
    if resume:
        trainer.restore(load_file(str(out / f"step-{resume}" / "state.safetensors")))
    began, cpu_began, tokens, losses = time.monotonic(), time.process_time(), 0, []
    for number, batch in enumerate(_batches(tokenizer, seed, plan, resume), start=resume):
        losses.append(trainer.step(number, batch))
        tokens += batch.ids.numel()
        done = number + 1
        if done % 20 == 0:
            wall, cpu = time.monotonic() - began, time.process_time() - cpu_began
            mean = sum(losses) / len(losses)
            print(f"step {done} loss {mean:.4f} tokens {tokens} wall {wall:.0f} s cpu {cpu:.0f} s", flush=True)
            losses.clear()
        if done % save_every == 0 and done < plan.steps:
            early = out / f"step-{done}"
            save_model(trainer.model, tokenizer, early)
            save_file(trainer.state(), str(early / "state.safetensors"))
    save_model(trainer.model, tokenizer, out)
    print(json.dumps(evaluate(out)), flush=True)


def _fast_dtype() -> str:
    """Bfloat16 where the processor has units for it; elsewhere it would be the slower one."""
    return "bfloat16" if "avx512bf16" in supported_isas() else "float32"


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train the NovaInfer demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default=_fast_dtype(), help="type of the matrix products")
    parser.add_argument("--save-every", type=int, default=200, help="steps between early checkpoints")
    parser.add_argument("--resume", type=int, default=0, help="step of an early checkpoint in DIR to go on from")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = _DTYPES[options.dtype]
    train(options.out, options.seed, Plan(steps=options.steps), dtype, options.save_every, options.resume)


if __name__ == "__main__":
    main()
