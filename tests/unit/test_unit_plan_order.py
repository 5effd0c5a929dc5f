"""What a scheduler process does first when a result is there: tell its gateways, or its ranks."""

from __future__ import annotations

import pytest

from novainfer.errors import EngineError
from novainfer.protocol.link import Packet
from novainfer.protocol.messages import AddRequest, Hello, OutputBatch
from novainfer.protocol.step import StepPlan
from novainfer.sampling.params import SamplingParams
from tests.replica import OracleGroup, make_replica

pytestmark = pytest.mark.unit


class Talk:
    """One gateway with a stream of five tokens and, if asked for, one of two. What it and the ranks hear, in order."""

    def __init__(self, *, has_short: bool = False) -> None:
        self.said: list[str] = []
        self.gone = False
        group = OracleGroup(vocab_size=50, block_size=16, num_blocks=8)
        submit = group.submit

        def submits(plan: StepPlan) -> None:
            if self.gone:
                raise EngineError("gone")
            self.said.append(f"plan {plan.step}")
            submit(plan)

        group.submit = submits  # type: ignore[method-assign]
        self.replica = make_replica(group, self._hear, 1.0, 0.0)
        self.replica.turn(0.0)
        long, short = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, seed=1) for n in (5, 2)]
        messages = [Hello("g"), AddRequest("r", [1, 2, 3], long, ref=7)]
        if has_short:
            messages.append(AddRequest("s", [4, 5], short, ref=8))
        for number, message in enumerate(messages):
            self.replica.handle(b"g", Packet(1, number, message), 0.0)

    def _hear(self, identity: bytes, packet: Packet) -> bool:
        message = packet.message
        if isinstance(message, OutputBatch):
            indexes = [message.base + offset for offset in message.offsets]
            self.said += [f"token {index}" for index in indexes]
            for output in message.outputs:
                self.said += ["end"] if output.finish_reason else []
        return True


def test_given_results_when_applied_then_the_next_plan_goes_before_tokens_but_after_a_first_one() -> None:
    talk = Talk()
    while "end" not in talk.said:
        talk.replica.turn(0.0)
    assert talk.said == [
        *("plan 1", "plan 2"),  # two are in flight
        *("token 0", "plan 3"),
        *("plan 4", "token 1"),
        *("plan 5", "token 2"),
        "token 3",
        "end",
    ]


def test_given_a_stream_that_ends_when_another_goes_on_then_the_end_is_told_before_the_next_plan() -> None:
    talk = Talk(has_short=True)
    while "end" not in talk.said:
        talk.replica.turn(0.0)
    end = talk.said.index("end")
    assert talk.said[end - 2 : end + 2] == ["plan 3", "token 1", "end", "plan 4"]


def test_given_ranks_that_are_gone_when_the_next_plan_cannot_be_sent_then_the_tokens_are_told_all_the_same() -> None:
    talk = Talk()
    while "token 0" not in talk.said:
        talk.replica.turn(0.0)
    talk.said.clear()
    talk.gone = True
    talk.replica.turn(0.0)
    assert talk.said == ["token 2"]
    assert not any(words.startswith("plan") for words in talk.said)
