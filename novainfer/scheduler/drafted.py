"""Drafts that came true: see `drafts`. Pure; in the scheduler."""

from __future__ import annotations

from collections import Counter
from itertools import repeat

from novainfer.protocol.step import StepResult
from novainfer.scheduler.batch import StepRecord
from novainfer.scheduler.fairness import FairShares
from novainfer.scheduler.request import Sequence
from novainfer.scheduler.totals import Totals


def take_drafts(
    record: StepRecord, result: StepResult, shares: FairShares, totals: Totals, block_size: int
) -> list[Sequence]:
    """Count those of a step that came true as computed and pending tokens, before its tokens are taken.

    Returns the sequences that have filled a block by them.
    """
    full = []
    num_sampled, drafted = Counter(result.rows), result.num_drafted or repeat(0)
    for i, (most, num_drafted) in enumerate(zip(record.drafts, drafted, strict=False)):
        sequence = record.sequences[i]
        if not most or sequence.drafts is None:
            continue
        extra = max(num_sampled[record.rows[i]] - 1, 0)
        sequence.num_ahead = max(sequence.num_ahead - most, 0)
        sequence.drafts.observe(num_drafted, extra)
        totals.drafted += num_drafted
        totals.drafts_accepted += extra
        if not extra or sequence.finished:
            continue
        sequence.num_pending += extra
        sequence.work += 2 * extra
        shares.charge(sequence.tenant, 2 * extra)
        if record.others[i] == sequence.generation:
            before = sequence.num_confirmed_tokens
            sequence.num_confirmed_tokens += extra
            sequence.num_computed_tokens += extra
            sequence.num_charged_tokens = max(sequence.num_charged_tokens, sequence.num_computed_tokens)
            if before // block_size != (before + extra) // block_size:
                full.append(sequence)
    return full
