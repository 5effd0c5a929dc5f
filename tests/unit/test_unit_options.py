"""The options of the command line, the environment and YAML, all generated from the config dataclasses."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

import pytest

from novainfer.config import COMPONENTS, ServeConfig, ServerConfig, check
from novainfer.entrypoints.cli import main
from novainfer.entrypoints.foreign_flags import ABSENT, WITHOUT_EFFECT
from novainfer.entrypoints.llm import config_from_options
from novainfer.entrypoints.options import (
    OPTIONS,
    Parser,
    Resolved,
    add_arguments,
    build_config,
    from_environment,
    from_yaml,
    option_values,
    parse_text,
    render,
    resolve,
)
from novainfer.entrypoints.presets import PRESETS
from novainfer.errors import ConfigError

pytestmark = pytest.mark.unit


def parse(*flags: str) -> argparse.Namespace:
    parser = Parser(prog="novainfer serve")
    add_arguments(parser)
    return parser.parse_args(list(flags))


def resolved(*flags: str, yaml: str | None = None, folder: Path | None = None, **variables: str) -> Resolved:
    if yaml is not None:
        assert folder is not None
        (folder / "config.yaml").write_text(yaml)
        flags = (*flags, "--config", str(folder / "config.yaml"))
    return resolve(parse(*flags), {f"NOVAINFER_{name.upper()}": value for name, value in variables.items()})


def test_every_config_field_when_options_are_generated_then_it_is_one_with_a_help_text() -> None:
    names = [item.name for component in COMPONENTS.values() for item in fields(component)]
    assert sorted(OPTIONS) == sorted(names)
    assert len(set(names)) == len(names), "two components share a field name: flags could not tell them apart"
    assert all(option.help for option in OPTIONS.values())


def test_no_options_when_resolved_then_the_defaults_hold() -> None:
    result = resolved()
    assert result.config == ServeConfig()
    assert set(result.origins.values()) == {"default"}


def test_vllms_flag_names_when_given_then_they_are_understood() -> None:
    config = resolved(
        *("some/model", "-tp", "2", "--max-model-len", "4096", "--max_num_seqs=8", "--max-num-batched-tokens", "512"),
        *("--gpu-memory-utilization", "0.5", "--dtype", "bfloat16", "--served-model-name", "a,b"),
        *("--served-model-name", "c", "--api-key", "k", "--trust-remote-code", "--no-enable-prefix-caching"),
    ).config
    assert (config.model.model, config.model.max_model_len, config.model.dtype) == ("some/model", 4096, "bfloat16")
    assert config.parallel.tensor_parallel_size == 2
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (8, 512)
    assert (config.cache.gpu_memory_utilization, config.cache.enable_prefix_caching) == (0.5, False)
    assert config.model.served_model_name == ("a", "b", "c")
    assert config.server.api_key == ("k",)
    assert config.model.trust_remote_code


def test_one_option_everywhere_when_resolved_then_flag_beats_variable_beats_yaml_beats_preset(tmp_path: Path) -> None:
    yaml = "max-num-seqs: 3\nblock-size: 32\nport: 1\n"
    result = resolved(
        *("--max-num-seqs", "1", "--preset", "laptop-cpu"),
        yaml=yaml,
        folder=tmp_path,
        max_num_seqs="2",
        block_size="64",
    )
    assert result.config.scheduler.max_num_seqs == 1
    assert result.config.cache.block_size == 64
    assert result.config.server.port == 1
    assert result.config.cache.kv_cache_memory_mib == 1024
    names = ("max_num_seqs", "block_size", "port", "kv_cache_memory_mib", "host")
    origins = [result.origins[name] for name in names]
    assert origins == ["flag", "NOVAINFER_BLOCK_SIZE", str(tmp_path / "config.yaml"), "preset laptop-cpu", "default"]


def test_an_optional_number_when_none_is_given_then_it_overrides_a_lower_source(tmp_path: Path) -> None:
    assert resolved("--max-model-len", "none", max_model_len="5").config.model.max_model_len is None
    assert resolved(yaml="num-blocks: null", folder=tmp_path, max_model_len="5").config.cache.num_blocks is None


def test_yaml_types_when_right_then_they_are_taken(tmp_path: Path) -> None:
    yaml = "served_model_name: [a, b]\napi-key: one\nstrict-params: true\ndrain-timeout: 3\npreset: tp2\n"
    config = resolved(yaml=yaml, folder=tmp_path).config
    assert config.model.served_model_name == ("a", "b")
    assert config.server.api_key == ("one",)
    assert config.server.strict_params
    assert config.server.drain_timeout == 3.0
    assert config.parallel.tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("enable-lora: true", "unknown option 'enable-lora': there are no LoRA adapters"),
        ("enable_auto_tool_choice: false", "unknown option 'enable_auto_tool_choice': calls are told"),
        ("max-num-sequences: 3", "unknown option 'max-num-sequences'; did you mean max-num-seqs?"),
        ("1: 2", "unknown option '1'"),
        ("port: '80'", "port needs a whole number, not '80'"),
        ("port: true", "port needs a whole number, not True"),
        ("port: null", "port needs a whole number, not None"),
        ("strict-params: 1", "strict_params needs true or false"),
        ("api-key: [1234]", "api_key needs a text, not 1234 .put it in quotes"),
        ("dtype: int4", "--dtype is one of auto, float32, float16, bfloat16, not 'int4'"),
        ("drain-timeout: .nan", "must be finite"),
        ("port: 1\nport: 2", "'port' is given twice"),
        ("block-size: 1\nblock_size: 2", "'block_size' is given twice"),
        ("- port", "must hold 'option: value' lines"),
        ("port: [", "cannot read"),
        ("preset: gigantic", "unknown preset 'gigantic'"),
    ],
)
def test_a_wrong_yaml_file_when_read_then_the_error_says_what_is_wrong(tmp_path: Path, yaml: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(yaml=yaml, folder=tmp_path)


def test_an_empty_or_missing_yaml_file_when_read_then_only_the_missing_one_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert from_yaml(tmp_path / "empty.yaml") == ({}, None, ())
    with pytest.raises(ConfigError, match="cannot read"):
        from_yaml(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("NOVAINFER_MAX_NUM_SEQ", "3", "unknown environment variable NOVAINFER_MAX_NUM_SEQ; did you mean NOVA"),
        ("NOVAINFER_PORT", "http", "NOVAINFER_PORT: --port needs a whole number, not 'http'"),
        ("NOVAINFER_STRICT_PARAMS", "maybe", "--strict-params is true or false, not 'maybe'"),
        ("NOVAINFER_DEVICE", "tpu", "--device is one of auto, cpu, cuda"),
        ("NOVAINFER_DRAIN_TIMEOUT", "inf", "must be finite"),
    ],
)
def test_a_wrong_variable_when_read_then_the_error_names_it(variable: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_environment({variable: value})


def test_a_kubernetes_service_called_novainfer_when_its_variables_are_there_then_they_are_ignored() -> None:
    injected = {
        "NOVAINFER_SERVICE_HOST": "10.0.0.1",
        "NOVAINFER_SERVICE_PORT_HTTP": "8000",
        "NOVAINFER_PORT": "tcp://10.0.0.1:8000",
        "NOVAINFER_PORT_8000_TCP_ADDR": "10.0.0.1",
        "NOVAINFER_STRICT_PARAMS": "yes",
    }
    assert from_environment(injected) == {"strict_params": True}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("demo", "--served-model-name", "a", "b"),
            "unexpected argument b: several values of one flag are",
        ),
        (("--max-num-seq", "3"), "unknown argument --max-num-seq; did you mean --max-num-seqs?"),
        (("--enable-lora",), "unknown argument --enable-lora: there are no LoRA adapters: merge one"),
        (("--max_loras=3",), "unknown argument --max-loras=3: there are no LoRA adapters: merge one"),
        (("--no-jinja",), "unknown argument --no-jinja: chats always go through"),
        (("--no-enable-reasoning",), "unknown argument --no-enable-reasoning: see --reasoning-parser"),
        (("--jinja=false",), "--jinja: ignored explicit argument 'false'"),
        (("-pp", "2"), "unknown argument -pp: layers are not shared out"),
        (("--enable-auto-tool-choise",), "unknown argument --enable-auto-tool-choise; did you mean --enable-prefix-c"),
        (("--port", "x"), "--port needs a whole number, not 'x'"),
        (("--dtype", "int4"), "--dtype is one of"),
    ],
)
def test_a_wrong_flag_when_parsed_then_the_command_exits_with_2_and_says_why(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", *flags])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_flags_of_others_that_change_nothing_when_given_then_they_are_taken_and_named() -> None:
    given = [*WITHOUT_EFFECT, "--disable_log_requests"]
    arguments = parse("demo", *given)
    assert arguments.without_effect == [*WITHOUT_EFFECT, "--disable-log-requests"]
    assert resolve(arguments, {}).config == ServeConfig()
    assert parse("demo").without_effect == []
    flags = {flag for option in OPTIONS.values() for flag in (option.flag, f"--no{option.flag[1:]}")}
    assert not flags & (WITHOUT_EFFECT.keys() | ABSENT.keys())
    assert not WITHOUT_EFFECT.keys() & ABSENT.keys()


def test_a_flag_of_others_with_true_when_given_then_it_is_that_without_the_value() -> None:
    arguments = parse("--enable-auto-tool-choice=true", "--enable_chunked_prefill=True", "demo", "--no-enable-lora")
    given = ["--enable-auto-tool-choice", "--enable-chunked-prefill", "--no-enable-lora"]
    assert (arguments.without_effect, arguments.model_argument) == (given, "demo")


def test_options_of_others_that_change_nothing_when_in_a_file_then_they_are_taken_and_named(tmp_path: Path) -> None:
    yaml = "enable_chunked_prefill: true\nenable-lora: false\nenable-log-requests: false\nport: 1\n"
    result = resolved("--jinja", yaml=yaml, folder=tmp_path)
    flags = ("--jinja", "--enable-chunked-prefill", "--no-enable-lora", "--no-enable-log-requests")
    assert (result.without_effect, result.config.server.port) == (flags, 1)


def test_options_of_others_that_change_nothing_when_given_to_an_llm_then_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    config = config_from_options({"enable_chunked_prefill": True, "enable_lora": False, "max_model_len": 5})
    assert config.model.max_model_len == 5
    flags = ["--enable-chunked-prefill", "--no-enable-lora"]
    assert caplog.messages == [f"{flag} has no effect: {WITHOUT_EFFECT[flag]}" for flag in flags]
    with pytest.raises(ConfigError, match="unknown option 'enable_chunked_prefill': prompts are always"):
        config_from_options({"enable_chunked_prefill": False})


def test_a_flag_of_others_when_given_to_a_client_then_there_is_no_word_of_the_servers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["models", "--context-length", "3"])
    assert "max-model-len" not in capsys.readouterr().err


def test_two_models_when_they_differ_then_it_is_an_error() -> None:
    with pytest.raises(ConfigError, match="two models"):
        resolved("a", "--model", "b")
    assert resolved("a", "--model", "a").config.model.model == "a"


def test_a_printed_config_when_read_back_then_it_is_the_same_except_for_masked_secrets(tmp_path: Path) -> None:
    result = resolved("org/näme", "--api-key", "s3cret,other", "--max-model-len", "77", "--cors-origins", "http://a,b")
    text = render(result)
    assert "s3cret" not in text
    assert 'api-key: ["****", "****"]  # flag' in text
    again = resolved("--api-key", "s3cret,other", yaml=text, folder=tmp_path)
    assert again.config == result.config


def test_print_config_when_asked_then_it_exits_0_without_serving(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--print-config", "--port", "1"]) == 0
    assert "port: 1  # flag" in capsys.readouterr().out


def test_a_config_when_taken_apart_and_put_together_then_it_is_equal() -> None:
    for preset in PRESETS.values():
        assert build_config(option_values(preset)) == preset
        assert ServeConfig.from_json(preset.to_json()) == preset
        check(preset)


def test_the_help_when_asked_for_then_no_heavy_library_is_loaded() -> None:
    code = (
        "import sys\nfrom novainfer.entrypoints.cli import main\n"
        "try:\n    main(['serve', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'ray', 'yaml', 'numpy', 'zmq', 'transformers', 'http.client'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--tensor-parallel-size" in done.stdout


@pytest.mark.parametrize("text", ["", " "])
def test_given_an_empty_key_when_resolved_then_the_server_does_not_open(text: str) -> None:
    with pytest.raises(ConfigError, match="empty"):
        parse_text(OPTIONS["api_key"], text)
    with pytest.raises(ConfigError, match="empty"):
        check(ServeConfig(server=ServerConfig(api_key=(text,))))


def test_the_replicas_of_no_server_when_asked_for_then_the_error_says_what_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["replicas"]) == 2
    words = f"novainfer: no server with --replicas has a run directory in {tmp_path}: name it with --run-dir\n"
    assert capsys.readouterr().err == words
