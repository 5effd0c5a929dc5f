"""The options of `novainfer serve`, generated from the config dataclasses: command line, environment, YAML, defaults.

A value is taken from the first of: flag, `NOVAINFER_*` variable, YAML file (`--config`), preset (`--preset`), default.
An unknown name anywhere is an error that names the nearest known one.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from novainfer.config import COMPONENTS, ServeConfig
from novainfer.entrypoints.foreign_flags import WITHOUT_EFFECT, flag_without_effect, why_refused
from novainfer.entrypoints.presets import PRESETS
from novainfer.errors import ConfigError

VARIABLE_PREFIX = "NOVAINFER_"
CONFIG_VARIABLE = "NOVAINFER_CONFIG"
PRESET_VARIABLE = "NOVAINFER_PRESET"
# Not options: read by the kernel build, by whoever keeps something for later starts, by clients, by the comparison.
PLACE_VARIABLES = frozenset({"NOVAINFER_CACHE_DIR", "NOVAINFER_CPU_ISA", "NOVAINFER_KERNEL_DIR"})
OTHER_VARIABLES = ("NOVAINFER_BASE_URL", "NOVAINFER_PEERS", *sorted(PLACE_VARIABLES), "NOVAINFER_SUPERVISOR_PID")
MASK = "****"

_TRUTHS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_SHORT_FLAGS = {"tensor_parallel_size": ("-tp",)}
# A Kubernetes Service called "novainfer..." puts such variables into every pod of its namespace.
_SERVICE_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_SERVICE_URL = re.compile(r"^(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True)
class Option:
    """One config field as an option."""

    component: str
    name: str
    kind: type  # str, int, float or bool; of the items where `many`
    default: Any
    help: str
    optional: bool = False  # may be None, written "none"
    many: bool = False  # a tuple: repeated, or separated by commas
    choices: tuple[str, ...] = ()
    secret: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.name.upper()


@dataclass(frozen=True, slots=True)
class Resolved:
    """The configuration, and for each option where its value came from (in words).

    without_effect: the flags of others that were given, or that options of a file stand for, and that change nothing.
    """

    config: ServeConfig
    origins: dict[str, str]
    without_effect: tuple[str, ...] = ()


def _describe(component: str, cls: type) -> list[Option]:
    hints = get_type_hints(cls)
    found = []
    for item in fields(cls):
        hint, optional, many = hints[item.name], False, False
        if get_origin(hint) is tuple:
            hint, many = get_args(hint)[0], True
        elif type(None) in get_args(hint):
            hint, optional = next(arg for arg in get_args(hint) if arg is not type(None)), True
        found.append(Option(component, item.name, hint, item.default, optional=optional, many=many, **item.metadata))
    return found


OPTIONS: dict[str, Option] = {
    option.name: option for component, cls in COMPONENTS.items() for option in _describe(component, cls)
}


# -- reading values ---------------------------------------------------------------------------------------------


def parse_text(option: Option, text: str) -> Any:
    """The value that `text` (a flag's or a variable's) stands for; raises `ConfigError`."""
    if option.optional and text.lower() == "none":
        return None
    if option.secret and not text.strip():
        # An unset shell or secret variable must not open the server.
        raise ConfigError(f"{option.flag} is given but empty")
    if option.many:
        return tuple(_scalar(option, item.strip()) for item in text.split(",") if item.strip())
    return _scalar(option, text)


def _scalar(option: Option, text: str) -> Any:
    if option.kind is bool:
        value = _TRUTHS.get(text.lower())
        if value is None:
            raise ConfigError(f"{option.flag} is true or false, not '{text}'")
        return value
    try:
        return _checked(option, option.kind(text))
    except ValueError:
        raise ConfigError(f"{option.flag} needs {_KIND_WORDS[option.kind]}, not '{text}'") from None


def parse_yaml_value(option: Option, value: Any) -> Any:
    """A value as YAML gave it, checked against the option's type; raises `ConfigError`."""
    if value is None and option.optional:
        return None
    if option.many:
        items = value if isinstance(value, list) else [value]
        return tuple(_typed(option, item) for item in items)
    return _typed(option, value)


def _typed(option: Option, value: Any) -> Any:
    if option.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not option.kind:
        hint = " (put it in quotes)" if option.kind is str and value is not None else ""
        raise ConfigError(f"{option.name} needs {_KIND_WORDS[option.kind]}, not {value!r}{hint}")
    return _checked(option, value)


def _checked(option: Option, value: Any) -> Any:
    if option.choices and value not in option.choices:
        raise ConfigError(f"{option.flag} is one of {', '.join(option.choices)}, not '{value}'")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{option.flag} must be finite")
    return value


_KIND_WORDS: dict[type, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


# -- the command line -------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, with `--max_model_len` for `--max-model-len` and a hint for a wrong flag."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(None if args is None else [_dashed(item) for item in args], namespace)

    def unknown(self, extras: Sequence[str]) -> None:
        """Exit with status 2 because of arguments that nobody knows."""
        known = [flag for action in self._actions for flag in action.option_strings if flag not in WITHOUT_EFFECT]
        if not extras[0].startswith("-"):
            self.error(f"unexpected argument {extras[0]}: several values of one flag are separated by commas")
        flag = extras[0].split("=")[0]
        why = why_refused(flag) if self._has_options else None
        self.error(f"unknown argument {extras[0]}{_nearest(flag, known) if why is None else f': {why}'}")

    @property
    def _has_options(self) -> bool:
        return all(option.flag in self._option_string_actions for option in OPTIONS.values())


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


def _dashed(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    flag = flag.replace("_", "-")
    return flag if flag in WITHOUT_EFFECT and _TRUTHS.get(value.lower()) else flag + equals + value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the positional MODEL, --config, --preset, --print-config and a flag for every config field.

    What it has of others' flags that change nothing is in `without_effect`.
    """
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML file; its keys are the flags without the leading dashes")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="ready-made values for common hardware")
    parser.add_argument("--print-config", action="store_true", help="show every value and where it came from, and exit")
    for flag in WITHOUT_EFFECT:
        about: dict[str, Any] = {"dest": "without_effect", "default": [], "help": argparse.SUPPRESS}
        parser.add_argument(flag, action="append_const", const=flag, **about)
    for component, cls in COMPONENTS.items():
        group = parser.add_argument_group((cls.__doc__ or component).strip().split("\n")[0].rstrip("."))
        for option in OPTIONS.values():
            if option.component == component:
                _add_flag(group, option)


def _add_flag(group: Any, option: Option) -> None:
    flags = (option.flag, *_SHORT_FLAGS.get(option.name, ()))
    common: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS}
    if option.kind is bool:
        common["help"] = f"{option.help} (default: {'yes' if option.default else 'no'})"
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
        return
    help_text = option.help
    if option.many:
        help_text += " Several: separated by commas, or the flag repeated."
    if option.default not in (None, (), ""):
        help_text += f" (default: {option.default})"
    common["help"] = help_text.replace("%", "%%")
    common["metavar"] = "{" + ",".join(option.choices) + "}" if option.choices else option.kind.__name__.upper()
    common["type"] = partial(_flag_value, option)
    group.add_argument(*flags, action="extend" if option.many else "store", **common)


def _flag_value(option: Option, text: str) -> Any:
    try:
        return parse_text(option, text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# -- putting the sources together -------------------------------------------------------------------------------


def resolve(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Resolved:
    """The configuration from all sources. `arguments` come from a parser that went through `add_arguments`.

    Raises `ConfigError` for an unknown name, a value of the wrong type, or a file that cannot be read.
    """
    flags = _from_flags(arguments)
    variables = from_environment(environ)
    path = arguments.config or environ.get(CONFIG_VARIABLE)
    file_values, file_preset, without_effect = from_yaml(Path(path)) if path else ({}, None, ())
    preset = arguments.preset or environ.get(PRESET_VARIABLE) or file_preset
    layers: list[tuple[str, dict[str, Any]]] = [
        ("flag", flags),
        ("variable", variables),
        (str(path), file_values),
        (f"preset {preset}", from_preset(preset)),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, option in OPTIONS.items():
        origins[name], values[name] = next(
            ((origin, layer[name]) for origin, layer in layers if name in layer), ("default", option.default)
        )
        if origins[name] == "variable":
            origins[name] = option.variable
    return Resolved(build_config(values), origins, (*arguments.without_effect, *without_effect))


def build_config(values: Mapping[str, Any]) -> ServeConfig:
    """A `ServeConfig` from values by option name; those that are missing keep their defaults."""
    parts: dict[str, dict[str, Any]] = {component: {} for component in COMPONENTS}
    for name, value in values.items():
        parts[OPTIONS[name].component][name] = value
    return ServeConfig(**{component: cls(**parts[component]) for component, cls in COMPONENTS.items()})


def option_values(config: ServeConfig) -> dict[str, Any]:
    """The inverse of `build_config`: every value by option name."""
    return {name: getattr(getattr(config, option.component), name) for name, option in OPTIONS.items()}


def _from_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: value for name, value in vars(arguments).items() if name in OPTIONS}
    for name, value in given.items():
        if OPTIONS[name].many:
            given[name] = tuple(value)
    model = arguments.model_argument
    if model is not None:
        if given.get("model", model) != model:
            raise ConfigError(f"two models were given: {model} and --model {given['model']}")
        given["model"] = model
    return given


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Values of the `NOVAINFER_*` variables, by option name."""
    by_variable = {option.variable: option for option in OPTIONS.values()}
    known = [*by_variable, CONFIG_VARIABLE, PRESET_VARIABLE, *OTHER_VARIABLES]
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(VARIABLE_PREFIX) or _SERVICE_LINK.search(variable) or _SERVICE_URL.match(text):
            continue
        if variable not in known:
            raise ConfigError(f"unknown environment variable {variable}{_nearest(variable, known)}")
        if variable in by_variable:
            option = by_variable[variable]
            try:
                values[option.name] = parse_text(option, text)
            except ConfigError as error:
                raise ConfigError(f"{variable}: {error}") from None
    return values


def from_yaml(path: Path) -> tuple[dict[str, Any], str | None, tuple[str, ...]]:
    """Values of a YAML file by option name, the preset that it names, and others' flags that change nothing."""
    import yaml  # only needed here, and slow to import

    try:
        text = path.read_text(encoding="utf-8")
        node, data = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if node is None or data is None:
        return {}, None, ()
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold 'option: value' lines")
    preset: str | None = None
    values: dict[str, Any] = {}
    without_effect: list[str] = []
    for key in (entry[0].value for entry in node.value):
        name = key.replace("-", "_")
        if name == "preset":
            preset = str(data[key])
        elif (flag := flag_without_effect(name, data.get(key))) is not None:
            without_effect.append(flag)
        elif name not in OPTIONS:
            why = why_refused("--" + name.replace("_", "-"))
            hint = _nearest(name, OPTIONS, dashes=True) if why is None else f": {why}"
            raise ConfigError(f"{path}: unknown option '{key}'{hint}")
        elif name in values:
            raise ConfigError(f"{path}: '{key}' is given twice")
        else:
            values[name] = _yaml_value(path, OPTIONS[name], data[key])
    return values, preset, tuple(without_effect)


def _yaml_value(path: Path, option: Option, value: Any) -> Any:
    try:
        return parse_yaml_value(option, value)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def from_preset(name: str | None) -> dict[str, Any]:
    """What a preset changes, by option name; `ConfigError` if there is no such preset."""
    if name is None:
        return {}
    if name not in PRESETS:
        raise ConfigError(f"unknown preset '{name}'; known are {', '.join(sorted(PRESETS))}")
    values = option_values(PRESETS[name])
    return {key: value for key, value in values.items() if value != OPTIONS[key].default}


def render(resolved: Resolved) -> str:
    """The configuration as YAML that `--config` reads back; secrets are masked, the origin is a comment."""
    lines = []
    for name, value in option_values(resolved.config).items():
        shown = _masked(OPTIONS[name], value)
        text = json.dumps(list(shown) if isinstance(shown, tuple) else shown, ensure_ascii=False)
        lines.append(f"{name.replace('_', '-')}: {text}  # {resolved.origins[name]}")
    return "\n".join(lines) + "\n"


def _masked(option: Option, value: Any) -> Any:
    if not option.secret or not value:
        return value
    return tuple(MASK for _ in value) if option.many else MASK


def _nearest(name: str, known: Any, *, dashes: bool = False) -> str:
    close = get_close_matches(name, list(known), n=1, cutoff=0.5)
    if not close:
        return ""
    return f"; did you mean {close[0].replace('_', '-') if dashes else close[0]}?"
