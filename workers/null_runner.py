"""A rank that computes nothing: it answers with tokens that mean nothing, at once or at a pace (`--executor null`).

What such a server costs and how fast it is, is gateway and scheduler alone: `bench/control_plane.py`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np

from novainfer.config import ServeConfig
from novainfer.executor.base import ExecutorInfo
from novainfer.protocol.columns import column_from
from novainfer.protocol.step import StepPlan, StepResult
from workers.checkpoint import find_checkpoint
from workers.kv_cache import resolve_max_model_len
from workers.launch import RankPlace
from workers.models.loader import load_hf_config
from workers.step_tokens import MOST_STEP_TOKENS

_log = logging.getLogger(__name__)

_FIRST_TOKEN, _NUM_TOKENS = 32, 64  # of a vocabulary: low ids are special in none that we know by their place alone
_MODE = "cpu none null/null none tp{ranks} best-effort"


@dataclass(frozen=True, slots=True)
class NullStep:
    """A step that is done at `due` (monotonic seconds). See `Pending`."""

    result: StepResult
    due: float

    def finish(self) -> StepResult:
        """The result, when it is due: this wait is the computing of a rank that computes nothing."""
        if (left := self.due - time.monotonic()) > 0:
            time.sleep(left)
        return self.result


class NullRunner:
    """Follows the rows just as far as to know which of them sample. See `Runner`."""

    def __init__(
        self, max_num_seqs: int, vocab_size: int, *, is_first: bool, step_seconds: float = 0.0, hidden_size: int = 1
    ) -> None:
        """`is_first`: the rank that answers. `step_seconds`: from one step's end to the next one's."""
        self.progress = 0
        self._is_first = is_first
        self._step_seconds = step_seconds
        self._due = 0.0  # when the newest step is done
        self._first = min(_FIRST_TOKEN, vocab_size - 1)
        self._count = max(min(_NUM_TOKENS, vocab_size - self._first), 1)
        self._vector = np.ones(hidden_size, "<f4").tobytes()  # an embedding
        self._embeds: set[int] = set()  # rows; of those that are no more, some
        self._num_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_computed = np.zeros(max_num_seqs, np.int64)

    def launch(self, plan: StepPlan) -> NullStep | None:
        """See `Runner`."""
        self.progress += 1
        for new in plan.new_rows:
            self._num_tokens[new.row] = len(new.token_ids)
            self._num_computed[new.row] = new.num_computed_tokens
            (self._embeds.add if new.embed else self._embeds.discard)(new.row)
        rows = np.array(plan.rows, np.int64)
        self._num_computed[rows] += np.array(plan.num_new_tokens, np.int64)
        sampled = rows[self._num_computed[rows] == self._num_tokens[rows]]
        token_ids = self._first + self._num_tokens[sampled] % self._count
        self._num_tokens[sampled] += 1
        if not self._is_first:
            return None
        self._due = max(self._due, time.monotonic()) + self._step_seconds
        columns = column_from(sampled.tobytes()), column_from(token_ids.tobytes())
        embeddings: dict[int, bytes] = {}
        if self._embeds:
            embeddings = dict.fromkeys(self._embeds.intersection(sampled.tolist()), self._vector)
        return NullStep(StepResult(plan.epoch, plan.step, *columns, embeddings=embeddings), self._due)

    def drop_rows(self) -> None:
        """See `Runner`."""

    def use_idle_time(self) -> bool:
        """See `Runner`: there is nothing to do."""
        return False


def null_runner(config: ServeConfig, place: RankPlace) -> tuple[NullRunner, ExecutorInfo]:
    """For the model's shape, which is all that is read of it. There are as many KV blocks as can be used."""
    _log.warning("--executor null: nothing is computed, and no answer of this server means anything")
    text = load_hf_config(find_checkpoint(config.model.model, config.model.revision)).get_text_config()
    max_model_len = resolve_max_model_len(config, text.max_position_embeddings)
    block_size, max_num_seqs = config.cache.block_size, config.scheduler.max_num_seqs
    info = ExecutorInfo(
        epoch=place.epoch,
        num_blocks=config.cache.num_blocks or max_num_seqs * -(-max_model_len // block_size),
        block_size=block_size,
        vocab_size=text.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens or max(MOST_STEP_TOKENS, max_num_seqs),
        mode=_MODE.format(ranks=place.world_size),
        hidden_size=text.hidden_size,
    )
    seconds = config.parallel.null_step_ms / 1000
    is_first, hidden_size = place.rank == 0, text.hidden_size
    runner = NullRunner(max_num_seqs, text.vocab_size, is_first=is_first, step_seconds=seconds, hidden_size=hidden_size)
    return runner, info
