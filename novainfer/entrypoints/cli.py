"""The `novainfer` command. Light to import: torch and ray are loaded by the command that needs them, if any."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from novainfer import __version__
from novainfer.entrypoints.options import Parser, add_arguments
from novainfer.errors import ConfigError, NovaInferError
from novainfer.text.parts import AUTO, REASONING_PARSERS, TOOL_CALL_PARSERS

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 wrong usage or configuration."""
    parser, commands = build_parser()
    arguments, extras = parser.parse_known_args(list(sys.argv[1:] if argv is None else argv))
    if arguments.command is None:
        parser.print_help()
        return EXIT_USAGE
    if extras:
        commands[arguments.command].unknown(extras)
    try:
        return _run(arguments)
    except ConfigError as error:
        print(f"novainfer: {error}", file=sys.stderr)
        return EXIT_USAGE
    except NovaInferError as error:
        print(f"novainfer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of the commands by name."""
    parser = Parser(prog="novainfer", description="A distributed LLM server with an OpenAI API.")
    parser.add_argument("--version", action="version", version=f"novainfer {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over HTTP", description=_SERVE, usage=_USAGE)
    add_arguments(serve)
    doctor = commands.add_parser("doctor", help="check this machine", description=_DOCTOR, usage=_USAGE)
    add_arguments(doctor)
    doctor.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    chat = commands.add_parser("chat", help="talk to a running server")
    chat.add_argument("message", nargs="?", help="one message; without it, a conversation")
    chat.add_argument("--system", help="system message")
    generate = commands.add_parser("generate", help="go on with a raw text (to ask something: chat)")
    generate.add_argument("prompt", nargs="?", help="the text, no template around it ('-' or nothing: standard input)")
    generate.add_argument("--offline", action="store_true", help="load --model in this process, use no server")
    verify = commands.add_parser("verify", help="compute an answer again from its receipt", description=_VERIFY)
    verify.add_argument("receipt", metavar="RECEIPT_FILE", help="a receipt or a saved response with one ('-': stdin)")
    verify.add_argument("--model", help="folder or hub id of the checkpoint (default: the receipt's name)")
    verify.add_argument("--tokenizer", help="the server's own --tokenizer, where it had one (default: the model's)")
    verify.add_argument("--chat-template", help="the server's own --chat-template, where it had one")
    for name, choices in (("tool-call", TOOL_CALL_PARSERS), ("reasoning", REASONING_PARSERS)):
        words = f"the server's own --{name}-parser, where it had one (default: auto)"
        verify.add_argument(f"--{name}-parser", choices=choices, default=AUTO, help=words)
    verify.add_argument("--device", choices=("cpu", "cuda"), help="where to compute (default: as the receipt says)")
    verify.add_argument("--any-mode", action="store_true", help="compare even if this machine computes in another mode")
    _add_run_batch(
        commands.add_parser("run-batch", help="answer a file of requests", description=_BATCH, usage=_BATCH_USAGE)
    )
    sim = commands.add_parser("sim", help="simulate servers under faults", description=_SIM)
    sim.add_argument("seed", type=int, metavar="SEED", help="the world to run; the first one with --seeds")
    sim.add_argument("--seeds", type=int, default=1, metavar="N", help="run so many seeds, on all cores (default: 1)")
    sim.add_argument("--mode", choices=("safety", "liveness", "both"), default="both", help="(default: both)")
    sim.add_argument("--steps", type=int, metavar="N", help="end each run after N events")
    sim.add_argument("--trace", action="store_true", help="print everything that happens")
    sim.add_argument("--keep-going", action="store_true", help="do not stop at the first violation")
    replicas = commands.add_parser("replicas", help="the replicas of a running server", description=_REPLICAS)
    replicas.add_argument("action", choices=("list", "add", "drain", "restart"), nargs="?", default="list")
    replicas.add_argument("replicas", type=int, nargs="*", metavar="REPLICA", help="which (restart: default all)")
    replicas.add_argument("--run-dir", help="of the server (default: the only one in the temporary directory)")
    replicas.add_argument("--wait", action="store_true", help="return when all that are left serve")
    models = commands.add_parser("models", help="list what a running server offers")
    for client in (chat, generate, models):
        _add_client_arguments(client)
    for sampler in (chat, generate):
        _add_sampling_arguments(sampler)
    return parser, dict(commands.choices)


def _add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server, which model."""
    parser.add_argument("--base-url", help="the server (default: NOVAINFER_BASE_URL, else http://127.0.0.1:8000)")
    parser.add_argument("--api-key", help="key to send (default: NOVAINFER_API_KEY)")
    parser.add_argument("--model", help="model name (default: the first one that the server offers)")


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The sampling parameters that are worth a flag; the server's defaults hold for the others."""
    parser.add_argument("--max-tokens", type=int, help="longest answer in tokens")
    parser.add_argument("--temperature", type=float, help="0 = greedy")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", help="stop string; may be given several times")


def _add_run_batch(parser: Parser) -> None:
    parser.add_argument("-i", "--input-file", metavar="FILE", required=True, help="requests, one a line ('-': stdin)")
    parser.add_argument("-o", "--output-file", metavar="FILE", required=True, help="for the results ('-': stdout)")
    parser.add_argument("--url", "--base-url", help="a running server (--api-key: its key); without it, one is started")
    parser.add_argument("--resume", action="store_true", help="keep the answers that FILE has, and ask for the others")
    parser.add_argument("--overwrite", action="store_true", help="drop what FILE has")
    words = "requests at once (default: twice what the server runs at once, or 128 if it does not say)"
    parser.add_argument("--concurrency", type=_positive, metavar="N", help=words)
    parser.add_argument(
        "--seeds-from-ids",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="give each request without a seed one made of its custom_id, so that it has one answer (default: yes)",
    )
    words = "seconds of pauses until a refused or broken request is given up (default: 600)"
    parser.add_argument("--retry-for", type=_seconds, default=600.0, metavar="SECONDS", help=words)
    words = "seconds that an answer may take before it is asked for again (default: 3600; 0: no limit)"
    parser.add_argument("--timeout", type=_seconds, default=3600.0, metavar="SECONDS", help=words)
    add_arguments(parser)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError
    return seconds


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "serve":
        from novainfer.entrypoints.serve import serve_command

        return serve_command(arguments)
    if arguments.command == "doctor":
        from novainfer.entrypoints.doctor import doctor_command

        return doctor_command(arguments)
    if arguments.command == "verify":
        from novainfer.entrypoints.verify import verify_command

        return verify_command(arguments)
    if arguments.command == "run-batch":
        from novainfer.entrypoints.run_batch import run_batch_command

        return run_batch_command(arguments)
    if arguments.command == "sim":
        from novainfer.entrypoints.sim import sim_command

        return sim_command(arguments)
    if arguments.command == "replicas":
        from novainfer.entrypoints.replicas import replicas_command

        return replicas_command(arguments)
    from novainfer.entrypoints.talk import chat_command, generate_command, models_command

    commands = {"chat": chat_command, "generate": generate_command, "models": models_command}
    return commands[arguments.command](arguments)


_USAGE = "%(prog)s [MODEL] [options]"
_SERVE = """Serve a model with an OpenAI API. Every option is also a NOVAINFER_* variable (--max-model-len is
NOVAINFER_MAX_MODEL_LEN) and a key of the YAML file given with --config; flags win over variables, variables over the
file, the file over a preset, a preset over the defaults."""
_VERIFY = """Compute an answer again from its receipt. Exit status 0: every token is the same, and so is what the answer
says (text, ends, counts), if the file holds one; 1: something is not; 2: that cannot be told, because the receipt is
none, the checkpoint is another one, or this machine computes in another mode."""
_BATCH_USAGE = "%(prog)s -i FILE -o FILE [options] [MODEL] [options of serve]"
_BATCH = """Answer a file of requests in OpenAI's batch format, one a line: {"custom_id": ..., "method": "POST", "url":
"/v1/chat/completions", "body": {...}}. Each result is written as soon as it is there. Exit status 0: all were answered
with 200; 1: some were not; 2: wrong usage. A batch that was broken off goes on with --resume, and has the same
answers as one that was not."""
_SIM = """Run scheduler, journal and client logic in a simulated world (virtual time, one thread, faults drawn from
the seed) and check what clients see. safety: faults go on to the end; liveness: they stop, and everything must finish.
Exit status 1 if something was wrong: then the fewest faults that suffice are printed. docs/simulation.md says more."""
_REPLICAS = """Replicas of a server that was started with --replicas: list them, add one, drain some (they finish what
they have and end), or restart some or all, one after another, while the others serve."""
_DOCTOR = """Check this machine, and the configuration that the same options would serve. Exit status 1 if serving would
fail."""


if __name__ == "__main__":
    sys.exit(main())
