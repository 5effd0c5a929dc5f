"""Conversations as packed training batches: token ids, document numbers, and what counts for the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from bench.demo_model.corpus import training_conversations
from bench.demo_model.tokenizer import END_OF_TEXT, TURN_END, TURN_START, render

_OPEN_PACKS = 64


@dataclass(frozen=True)
class Encoded:
    """One conversation. `counts[i]` says that the model has to predict token i."""

    ids: NDArray[np.int64]  # [num_tokens]
    counts: NDArray[np.bool_]  # [num_tokens]


@dataclass(frozen=True)
class Batch:
    """Packs of one length. A token sees only earlier tokens of its own document."""

    ids: Tensor  # [num_packs, length] int64
    documents: Tensor  # [num_packs, length] int64, -1 where there is padding
    counts: Tensor  # [num_packs, length] bool

    def attention_mask(self) -> Tensor:
        """[num_packs, 1, length, length] bool, true where a query (row) may see a key (column)."""
        same = self.documents[:, :, None] == self.documents[:, None, :]
        return same.tril()[:, None]


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Encoded]:
    """Token ids of rendered conversations; what the assistant writes, up to its end of turn, counts."""
    header = tokenizer.encode(f"{TURN_START}assistant\n").ids
    end = tokenizer.token_to_id(TURN_END)
    encoded = []
    for encoding in tokenizer.encode_batch(list(texts)):
        ids = np.array(encoding.ids, dtype=np.int64)
        counts = np.zeros(len(ids), dtype=np.bool_)
        starts = np.flatnonzero(ids == header[0])
        ends = np.flatnonzero(ids == end)
        for start, stop in zip(starts, ends, strict=True):
            if list(ids[start : start + len(header)]) == header:
                counts[start + len(header) : stop + 1] = True
        encoded.append(Encoded(ids, counts))
    return encoded


def _packs(tokenizer: Tokenizer, seed: int, long: bool, length: int) -> Iterator[list[Encoded]]:
    """Packs of at most `length` tokens, filled first-fit; longer conversations are dropped."""
    stream = training_conversations(seed, long)
    packs: list[list[Encoded]] = []
    room: list[int] = []
    while True:
        for document in encode(tokenizer, [render(next(stream)) for _ in range(500)]):
            size = len(document.ids)
            if size > length:
                continue
            place = next((i for i, free in enumerate(room) if free >= size), None)
            if place is None:
                packs.append([])
                room.append(length)
                place = len(packs) - 1
            packs[place].append(document)
            room[place] -= size
            if len(packs) > _OPEN_PACKS:
                fullest = room.index(min(room))
                room.pop(fullest)
                yield packs.pop(fullest)


def batches(tokenizer: Tokenizer, seed: int, num_packs: int, length: int, long: bool = False) -> Iterator[Batch]:
    """An endless seeded stream of batches of `num_packs` x `length` tokens."""
    padding = tokenizer.token_to_id(END_OF_TEXT)
    packs = _packs(tokenizer, seed, long, length)
    while True:
        ids = np.full((num_packs, length), padding, dtype=np.int64)
        documents = np.full((num_packs, length), -1, dtype=np.int64)
        counts = np.zeros((num_packs, length), dtype=np.bool_)
        for row in range(num_packs):
            at = 0
            for number, document in enumerate(next(packs)):
                here = slice(at, at + len(document.ids))
                ids[row, here], documents[row, here], counts[row, here] = (
                    document.ids,
                    number,
                    document.counts,
                )
                at = here.stop
        yield Batch(torch.from_numpy(ids), torch.from_numpy(documents), torch.from_numpy(counts))
