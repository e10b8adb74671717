"""Defaults of options that config files and variables set: ``[COMMAND]`` has the long options of a command as keys."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from cachectl.cli.parser import VERBS, Parser, verb_module
from cachectl.config import Setting, read_flag
from cachectl.layers.base.errors import BadRequest
from cachectl.layers.base.selection import parse_age, parse_size

if TYPE_CHECKING:
    from cachectl.config import Config, Value

#: Keys outside a table: the default of that option in every command that has it.
GENERAL: Final = ("python", "wait")
#: The command whose table has limits instead of defaults.
LIMITED: Final = "prune"
#: Options whose default can be set. Those that give consent, select entries or name a file are for one call only.
SETTABLE: Final = frozenset(
    {
        *(*GENERAL, "by", "explain", "kernels", "layer", "limit", "max-size", "neighbours", "prove", "rounds"),
        *("scratch", "shell", "sign", "sort"),
    }
)
#: Checks of values that a command reads later, by what its help calls them.
_CHECKS: Final = {"AGE": parse_age, "SIZE": parse_size}


def set_defaults(config: Config, options: argparse.Namespace) -> bool:
    """Set the configured defaults in the parser of the command, and return whether there are any.

    ``options`` is what was typed. Raises :class:`BadConfig` for a wrong key or value of this command, and for a key
    outside its table that no command has.
    """
    demand_tables(config)
    # What was typed counts; a repeatable option would be appended to its default.
    untyped = {
        action.dest: converted(config, setting, action)
        for setting, action in defaults_of(config, options.verb, options.parser)
        if setting.origin != "default" and getattr(options, action.dest) == action.default
    }
    if hasattr(options, "stale") and not hasattr(options, "python") and (found := config.find_interpreters()):
        # What is stale depends on them in every command.
        untyped["python"] = list(map(str, found))
    options.parser.set_defaults(**untyped)
    return bool(untyped)


def demand_tables(config: Config) -> None:
    """Raise :class:`BadConfig` if the files have a key outside the tables that is neither general nor a command."""
    for setting in config.below():
        if setting.key not in GENERAL and setting.key not in VERBS:
            raise setting.wrong(f"no command, and no option of all commands; those are {' and '.join(GENERAL)}")


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options of a command that have a default to set, by name without dashes."""
    options = {name.removeprefix("--"): action for action in parser._actions for name in action.option_strings}  # noqa: SLF001 - argparse lists them nowhere else
    return {name: action for name, action in options.items() if name in SETTABLE}


def parser_of(verb: str) -> Parser:
    """Return a parser with the options of one command."""
    parser = Parser(prog=f"cachectl {verb}", add_help=False)
    verb_module(verb).add_options(parser)
    return parser


def defaults_of(
    config: Config, verb: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[Setting, argparse.Action]]:
    """Yield the setting of each option of a command, with the option. Raises :class:`BadConfig` for a wrong key."""
    options = options_of(parser)
    limited = verb == LIMITED
    for setting in () if limited else config.below(verb):
        if setting.keys[-1] not in options:
            raise setting.wrong(f"no option of {verb} that can be set; there are {', '.join(options) or 'none'}")
    for name, action in options.items():
        found = None if limited else config.find(verb, name)
        if name in GENERAL:
            yield found or config.setting(name), action
        elif not limited:
            default = tuple(action.default) if isinstance(action.default, list) else action.default
            yield found or Setting((verb, name), default), action


def converted(config: Config, setting: Setting, action: argparse.Action) -> object:
    """Return the value of a setting as the option's default. Raises :class:`BadConfig`."""

    def kind(value: Value) -> object:
        if setting.keys[-1] == "python":
            return [_one(action, str(path)) for path in config.read_interpreters(value)]
        if action.nargs == 0:
            return read_flag(value)
        if isinstance(action.default, list):
            return [_one(action, one) for one in (value if isinstance(value, tuple) else (value,))]
        return _one(action, value)

    return setting.read(kind)


def _one(action: argparse.Action, value: object) -> object:
    """Convert one value as argparse does its text. Raises :class:`ValueError`."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        message = f"{value!r} is no {action.metavar or 'text'}"
        raise BadRequest(message)
    text = str(value)
    if action.metavar in _CHECKS:
        _CHECKS[action.metavar](text)
    try:
        read = action.type(text) if callable(action.type) else text
    except (argparse.ArgumentTypeError, TypeError) as error:
        raise ValueError(str(error)) from error
    if action.choices is not None and read not in action.choices:
        message = f"{text!r} is none of {', '.join(map(str, action.choices))}"
        raise ValueError(message)
    return read
