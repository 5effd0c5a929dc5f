"""The comparison with other servers: its load, its arithmetic, its table, and its rounds with peers made of nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import pytest

from bench import cases, compare, comparison, foreign, gate, workloads
from bench.comparison import PeerRound
from bench.make_checkpoint import CHAT_TEMPLATE, make_tokenizer
from bench.peers.base import Running
from bench.peers.registry import OURS, OURS_INT8, PEERS, chosen
from bench.serving import Measured

pytestmark = pytest.mark.unit

VOCABULARY = 9_200  # the smallest that has all pairs of letters
FAST = cases.Figure("speed", "tok/s", is_higher_better=True)
SLOW = cases.Figure("wait", "ms")
PRECISIONS = {OURS: "bf16", "one": "bf16", "two": "bf16", OURS_INT8: "int8", "eight": "int8", comparison.LIMIT: ""}
OWN = (OURS, OURS_INT8)


def measured(
    began: float = 0.0, *, output_len: int = 3, ttft: float = 0.1, itls: Sequence[float] = (0.2, 0.3)
) -> Measured:
    return Measured(5, output_len, began, ttft, ttft + sum(itls), list(itls))


def test_the_load_when_drawn_then_it_has_the_tables_sizes_and_no_prompt_twice() -> None:
    drawn = cases.cases(VOCABULARY, 3)
    sizes = [
        (
            case.name,
            len(case.items),
            len(case.items[0].prompt_token_ids),
            case.items[0].max_tokens,
            case.max_concurrency,
        )
        for case in drawn
    ]
    assert sizes == [
        ("c1", 4, 128, 64, 1),
        ("c4", 8, 128, 64, 4),
        ("c16", 32, 128, 64, 16),
        ("long", 3, 1024, 1, 1),
        ("prefix cold", 1, 544, 1, 1),
        ("prefix warm", 8, 544, 1, 1),
        ("prefix at once", 16, 544, 1, 16),
    ]
    warm = [item for items, _ in cases.warm_up(VOCABULARY) for item in items]
    prompts = [tuple(item.prompt_token_ids) for case in drawn for item in case.items]
    prompts += [tuple(item.prompt_token_ids) for item in warm]
    assert len(set(prompts)) == len(prompts)
    assert max(max(prompt) for prompt in prompts) < VOCABULARY - 3
    beginnings = [prompt[:16] for prompt in prompts]
    assert len(prompts) - len(set(beginnings)) == 1 + 8 + 16 - 1, "only the shared prefix is shared"


def test_the_load_when_drawn_again_then_it_is_equal_and_another_seed_gives_another() -> None:
    first, again, other = (cases.cases(VOCABULARY, seed) for seed in (1, 1, 2))
    assert [case.items for case in first] == [case.items for case in again]
    assert not any(a.items[0] == b.items[0] for a, b in zip(first, other, strict=True))
    assert cases.chats(VOCABULARY, 1) == cases.chats(VOCABULARY, 1)
    assert len(set(cases.chats(VOCABULARY, 1))) == cases.NUM_CHATS


def test_a_prompt_when_written_as_text_then_it_is_as_many_tokens_and_keeps_its_prefix() -> None:
    tokenizer = make_tokenizer(VOCABULARY)
    items = workloads.shared_prefix(VOCABULARY, num_seqs=4, num_prefix=17, num_own=32, num_output=1)
    encoded = [tokenizer.encode(cases.text_of(item.prompt_token_ids)).ids for item in items]
    assert [len(ids) for ids in encoded] == [49] * 4
    assert len({tuple(ids[:17]) for ids in encoded}) == 1
    assert len({tuple(ids) for ids in encoded}) == 4


def test_a_chat_when_written_out_then_its_prompt_is_as_long_as_the_limit_counts() -> None:
    messages = [{"role": "user", "content": text} for text in cases.chats(VOCABULARY, 0)]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # as in transformers
    template = environment.from_string(CHAT_TEMPLATE)
    prompts = [template.render(messages=[message], add_generation_prompt=True) for message in messages]
    lengths = [len(encoded.ids) for encoded in make_tokenizer(VOCABULARY).encode_batch(prompts)]
    assert lengths == [cases.CHAT_PROMPT_TOKENS] * cases.NUM_CHATS


def test_figures_when_computed_then_prefill_counts_and_an_event_after_the_last_token_does_not() -> None:
    early = measured(1.0, itls=(0.2, 0.3, 0.001))
    late = measured(2.0)
    assert cases.inter_token_times([early, late]) == [0.2, 0.3, 0.2, 0.3]
    assert cases.output_tokens_per_second([early, late]) == pytest.approx(6 / 1.6)
    assert cases.inter_token_times([measured(output_len=1, itls=(0.001,))]) == []


def test_a_case_when_a_request_failed_or_fell_short_then_it_says_so() -> None:
    case = cases.Case("c", [workloads.Item([1], 3)] * 2, 1, ())
    assert cases.wrong(case, [measured(), measured()]) == ""
    assert cases.wrong(case, [measured(), measured(output_len=2)]) == "2 tokens instead of 3"
    assert cases.wrong(case, [Measured(1, error="HTTP 503"), measured()]) == "HTTP 503"


def rounds_of(figure: cases.Figure, **values: Sequence[float]) -> list[PeerRound]:
    return [
        PeerRound(peer, number, {figure.key: value})
        for peer, mine in values.items()
        for number, value in enumerate(mine)
    ]


@pytest.mark.parametrize(
    ("figure", "best", "ratio"), [(FAST, "two", 30 / 20), (SLOW, "one", 10 / 30)], ids=["higher", "lower"]
)
def test_rows_when_peers_have_run_then_ours_is_compared_with_the_best_median(
    figure: cases.Figure, best: str, ratio: float
) -> None:
    rounds = rounds_of(figure, ours=[30, 31, 1], one=[10, 10, 99], two=[20, 20, 20], eight=[500, 1, 500])
    (row,) = comparison.rows([figure], rounds, OWN, PRECISIONS)
    assert (row.best, row.ratio) == (best, pytest.approx(ratio))
    assert row.spreads["one"] == comparison.Spread(10, 10, 99, 3, 0.0)
    assert list(row.spreads) == [OURS, "one", "two", "eight"], "another precision is shown, not compared"


def test_rows_when_a_figure_is_missing_then_there_is_no_ratio_or_no_row() -> None:
    only_others = rounds_of(FAST, one=[10], two=[20])
    assert [row.ratio for row in comparison.rows([FAST, SLOW], only_others, OWN, PRECISIONS)] == [None]
    only_ours = rounds_of(FAST, ours=[10], eight=[20])
    assert [(row.best, row.ratio) for row in comparison.rows([FAST], only_ours, OWN, PRECISIONS)] == [("", None)]
    zero = rounds_of(SLOW, ours=[0.0], one=[5.0])
    assert [row.ratio for row in comparison.rows([SLOW], zero, OWN, PRECISIONS)] == [None]


def test_rows_when_there_are_two_of_ours_then_each_is_compared_with_its_own_kind_and_the_first_with_the_limit() -> None:
    rounds = rounds_of(
        SLOW, **{OURS: [30.0], "one": [45.0], OURS_INT8: [10.0], "eight": [25.0], comparison.LIMIT: [27.0]}
    )
    (row,) = table = comparison.rows([SLOW], rounds, OWN, PRECISIONS)
    assert row.ratios == {"ours/one": 1.5, "ours-int8/eight": 2.5}
    assert row.of_limit == pytest.approx(0.9)
    assert comparison.markdown(table, [OURS]).splitlines()[2].endswith("| one | 1.50x | 90% |")
    lines = comparison.ratios_markdown(table).splitlines()
    assert lines[0] == "| case | ours to one | ours-int8 to eight |"
    assert lines[2] == "| wait | 1.50x | 2.50x |"


def test_the_table_when_printed_then_spread_best_peer_ratio_and_foreign_use_are_in_it() -> None:
    rounds = rounds_of(FAST, ours=[30, 31, 32], one=[1000, 1500, 2000])
    rounds[3].foreign_cores[FAST.key] = 0.2
    table = comparison.rows([FAST], rounds, OWN, PRECISIONS)
    lines = comparison.markdown(table, [OURS, "one", "two"]).splitlines()
    assert lines[0] == "| case | ours | one | two | best peer | ours to it | ours to the limit |"
    assert lines[2] == "| speed, tok/s | 31.0 (30.0-32.0) | 1,500 (1,000-2,000) * | - | one | 0.02x | - |"
    assert "0.1 cores" in lines[-1]
    assert "*" not in comparison.markdown(comparison.rows([FAST], rounds[:3], OWN, PRECISIONS), [OURS])
    written = json.loads(json.dumps(comparison.as_json(table)))
    assert written[0]["peers"]["one"] == {"median": 1500, "min": 1000, "max": 2000, "rounds": 3}
    assert (written[0]["figure"], written[0]["best_peer"]) == ("speed_tok_per_s", "one")


@dataclass
class FakePeer:
    """Answers every request in no time; its driver fails as it is told."""

    name: str
    failing: str = ""  # '', 'start', 'requests' or 'chat'
    precision: str = "bf16"
    package: str = "fake"
    started: list[str] = field(default_factory=list)

    def install(self, folder: Path) -> None:
        raise NotImplementedError

    def version(self, folder: Path) -> str | None:
        return None if self.failing == "missing" else "1"

    @contextlib.contextmanager
    def start(self, folder: Path, checkpoint: Path, port: int) -> Iterator[Running]:
        self.started.append(self.name)
        if self.failing == "start":
            raise SystemExit("it has ended")
        yield Running(self, "", 0, 1.5)

    def run(self, items: Sequence[workloads.Item], max_concurrency: int) -> list[Measured]:
        error = "HTTP 500" if self.failing == "requests" else ""
        return [Measured(1, item.max_tokens, 1.0, 0.5, 1.0, [0.1] * item.max_tokens, error) for item in items]

    def chat(self, text: str) -> float | None:
        if self.failing == "chat":
            raise ValueError("HTTP 404")
        return None if self.failing == "none" else 0.25


PLAN = compare.Plan(Path("nowhere"), VOCABULARY, 3, compare.CASE_NAMES)


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer made of nothing has no process tree to look at."""
    monkeypatch.setattr(compare, "pss_bytes", lambda root: 7e6)
    monkeypatch.setattr(foreign, "cpu_seconds", lambda root: 0.0)


def test_rounds_when_run_then_every_peer_is_in_each_and_another_one_begins(capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []
    peers = [FakePeer(name, started=order) for name in ("a", "b", "c")]
    limits = [PeerRound(comparison.LIMIT, number) for number in range(3)]
    found = compare.compare(peers, PLAN, limits.__getitem__)
    results = found[::2]
    assert order == list("abcbcacab")
    assert found[1::2] == [limit for limit in limits for _ in peers]
    taken = {figure.key for figure in compare.figures(VOCABULARY)} - {figure.key for figure in compare.MACHINE}
    assert all(set(one.values) == taken for one in results)
    assert results[0].values[cases.CHAT.key] == 250.0
    assert results[0].values[cases.READY.key] == 1.5
    assert results[0].values[cases.MEMORY.key] == 7.0
    assert "round 3 of 3, b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failing", "failures", "num_figures"),
    [("start", {"start"}, 0), ("chat", {"chat"}, 21), ("none", set(), 21)],
)
def test_a_peer_when_something_fails_then_that_has_a_failure_and_the_rest_its_figures(
    failing: str, failures: set[str], num_figures: int
) -> None:
    result = compare.measure(FakePeer("a", failing), 0, PLAN)
    assert (set(result.failures), len(result.values)) == (failures, num_figures)


def test_a_peer_when_its_requests_fail_then_no_case_has_figures() -> None:
    result = compare.measure(FakePeer("a", "requests"), 0, PLAN)
    assert set(result.failures) == set(compare.CASE_NAMES) - {"chat"}
    assert set(result.values) == {cases.READY.key, cases.MEMORY.key, cases.CHAT.key}


def test_a_peer_that_is_not_installed_when_chosen_then_it_is_named_and_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    peers = [FakePeer("a"), FakePeer("b", "missing")]
    assert [peer.name for peer in compare.installed(peers)] == ["a"]
    assert "make peers`): b" in capsys.readouterr().err


def test_peers_when_chosen_by_name_then_none_means_all_and_an_unknown_one_is_refused() -> None:
    assert [peer.name for peer in chosen(["vllm", OURS])] == ["vllm", OURS]
    assert len(chosen([])) == len(PEERS)
    with pytest.raises(SystemExit, match="no peer x"):
        chosen(["x"])


def test_foreign_use_when_looked_at_then_the_servers_and_our_own_part_are_not_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = iter([foreign._Look(10.0, 100.0, 1.0, 50.0), foreign._Look(14.0, 107.0, 2.0, 55.0)])
    monkeypatch.setattr(foreign, "_look", lambda root: next(looks))
    assert foreign.ForeignCpu(1).end() == foreign.Foreign(cores=0.5, stolen_cores=0.25)


@pytest.mark.parametrize(("content", "is_red"), [(None, False), ("{}", False), ('{"tests/a.py::b": true}', True)])
def test_the_gate_when_tests_failed_last_then_it_refuses_and_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, is_red: bool
) -> None:
    monkeypatch.setattr(gate, "REPOSITORY", tmp_path)
    path = tmp_path / ".pytest_cache" / "v" / "cache" / "lastfailed"
    path.parent.mkdir(parents=True)
    if content is not None:
        path.write_text(content)
    assert ("tests/a.py::b" in gate.reason_to_refuse()) == is_red
