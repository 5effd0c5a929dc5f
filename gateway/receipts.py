"""Receipts of answers, for those who ask for them; see `novainfer.receipt`."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gateway.generation import Generation, PromptState
from gateway.slices import Slices
from novainfer.checkpoint import WEIGHT_FILES, model_digest, resolve_checkpoint
from novainfer.client.engine_client import EngineClient
from novainfer.config import ModelConfig
from novainfer.errors import EngineError
from novainfer.protocol.messages import FINISH_LENGTH, FINISH_STOP
from novainfer.receipt import ChoiceReceipt, Receipt, token_hash

log = logging.getLogger(__name__)


class ModelDigest:
    """The digest of the served checkpoint, read when it is first asked for and then kept.

    It may take minutes, in a thread that does not hold up the process's end.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._future: Future[str] | None = None

    async def get(self) -> str:
        """See `novainfer.checkpoint.model_digest`. Raises `EngineError` if there is none; the next call tries again."""
        if self._future is None:
            self._future = Future()
            self._future.set_running_or_notify_cancel()  # so that nobody who goes away cancels it for the others
            threading.Thread(target=self._compute, args=(self._future,), name="model-digest", daemon=True).start()
        try:
            return await asyncio.wrap_future(self._future)
        except Exception as error:
            self._future = None
            log.error("no digest of the model: %s", error)
            raise EngineError("The digest of the model cannot be computed.") from error

    def _compute(self, future: Future[str]) -> None:
        try:
            folder = resolve_checkpoint(self._model.model, revision=self._model.revision, files=WEIGHT_FILES)
            future.set_result(model_digest(folder))
        except Exception as error:
            future.set_exception(error)


@dataclass(frozen=True, slots=True)
class Receipts:
    """The receipts of one generation. `model` is the name that the client used."""

    generation: Generation
    model: str
    client: EngineClient
    digest: ModelDigest

    async def fields(self) -> dict[str, Any]:
        """What the answer's object gets when all has ended: `receipt`, or `receipts` where there are several prompts.

        A prompt has none (null) if a choice of it was cancelled, or if workers of another mode came in between.
        """
        digest = await self.digest.get()
        slices = Slices()
        receipts = [await self._receipt(prompt, digest, slices) for prompt in self.generation.prompts]
        return {"receipt": receipts[0]} if len(receipts) == 1 else {"receipts": receipts}

    async def _receipt(self, prompt: PromptState, digest: str, slices: Slices) -> dict[str, Any] | None:
        engine, now = self.generation.engine, self.client.limits
        choices: list[ChoiceReceipt] = []
        for output in self.generation.outputs_of(prompt):
            if output.finish_reason in (FINISH_STOP, FINISH_LENGTH):
                choices.append(ChoiceReceipt(output.num_tokens, token_hash(output.token_ids), output.finish_reason))
            await slices.pause()
        if len(choices) < prompt.params.n or now is None or now.mode != engine.mode:
            return None
        return Receipt(
            model=self.model,
            model_digest=digest,
            mode=engine.mode,
            max_model_len=engine.max_model_len,
            prompt_token_ids=tuple(prompt.token_ids),
            eos_token_ids=tuple(prompt.eos_token_ids),
            after_prompt=self.generation.after_prompt,
            params=prompt.params,
            choices=tuple(choices),
        ).to_json()
