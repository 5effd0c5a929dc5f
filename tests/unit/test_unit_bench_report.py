"""What the machine would allow, and a comparison in a document."""

from __future__ import annotations

from typing import Any

import pytest

from bench import cases, compare, publish, roofline
from bench.make_checkpoint import SHAPES

pytestmark = pytest.mark.unit

QWEN = roofline.Decoder.of(SHAPES["qwen3-0.6b"].config())
MACHINE = roofline.Machine(bytes_per_second=40e9, flops_per_second=400e9)


def test_a_known_shape_when_its_token_is_counted_then_the_numbers_are_those_of_its_weights() -> None:
    assert QWEN.layer_weights == 28 * (1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024 + 3 * 1024 * 3072)
    assert QWEN.head_weights == 151_936 * 1024
    assert QWEN.kv_numbers == 28 * 2 * 8 * 128


def test_one_row_when_decoded_then_reading_the_weights_is_its_limit() -> None:
    read = 2 * (QWEN.layer_weights + QWEN.head_weights + 101 * QWEN.kv_numbers)
    assert QWEN.step_seconds(MACHINE, [(1, 100)]) == pytest.approx(read / 40e9)


def test_a_long_prompt_when_computed_then_multiplying_is_its_limit_and_then_reading_the_projection() -> None:
    layer, keys_and_values, head_numbers = QWEN.layer_weights / 28, 2 * 1024 * 1024, 16 * 128
    products = 1024 * (27 * layer + keys_and_values) + layer - keys_and_values
    products += 2 * head_numbers * (27 * 1024 * 1025 / 2 + 1024)
    read = 2 * QWEN.head_weights
    assert QWEN.step_seconds(MACHINE, [(1024, 0)]) == pytest.approx(2 * products / 400e9 + read / 40e9)


def test_limits_when_named_then_each_is_a_figure_of_the_comparison() -> None:
    found = roofline.limits(QWEN, MACHINE)
    assert set(found) < {figure.key for figure in compare.figures(SHAPES["qwen3-0.6b"].vocab)}
    assert found["prefix_warm_TTFT_ms"] < found["prefix_cold_TTFT_ms"] < found["prompt_of_1024_TTFT_ms"]
    assert found["c1_output_tok_per_s"] < found["c4_output_tok_per_s"] < found["c16_output_tok_per_s"]


def comparison(**values: Any) -> dict[str, Any]:
    row = {"median": 2.0, "min": 1.0, "max": 4.0, "rounds": 3}
    return {
        "date": "20260102-030405",
        "commit": "0123456789abcdef",
        "modified": False,
        "machine": {"cpu": "a CPU", "cores": 2, "memory_gib": 8, "system": "Linux 6", "python": "3.11"},
        "peers": {"ours": "0.1.0", "other": "7"},
        "command": "python -m bench.compare",
        "markdown": "| the table |",
        "table": [{"figure": cases.CHAT.key, "is_higher_better": False, "peers": {"ours": row, "other": row}}],
    } | values


def test_a_document_when_a_comparison_is_put_in_then_what_stood_between_the_marks_is_gone() -> None:
    document = f"before\n{publish.BEGIN}\nold\n{publish.END}\nafter\n"
    text = publish.insert(document, publish.block(comparison()))
    assert text.startswith(f"before\n{publish.BEGIN}\n2026-01-02, commit 0123456789; a CPU, 2 cores")
    assert text.endswith(f"{publish.END}\nafter\n")
    assert "old" not in text
    assert "| the table |" in text
    assert publish.insert(text, publish.block(comparison())) == text


def test_a_document_without_marks_when_a_comparison_is_put_in_then_value_error() -> None:
    with pytest.raises(ValueError, match="comparison: begin"):
        publish.insert("text", "new")
