"""``cachectl config``: every setting, and the file, line or variable that it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.parser import VERBS, Parser

if TYPE_CHECKING:
    from cachectl.config import Setting, Settings, Value


def add_options(parser: Parser) -> None:
    parser.add_form()


def run(call: Call) -> int:
    from cachectl.config import Settings

    done = Settings(call.config.places, tuple(_settings(call)))
    return call.show(done, _show, lambda done: (COLUMNS, done.settings))


def _settings(call: Call) -> Iterator[Setting]:
    """Yield the general settings, the limits, and the defaults of each command. Raises :class:`BadConfig`."""
    from cachectl.cli.defaults import converted, defaults_of, demand_tables, parser_of

    config = call.config
    demand_tables(config)
    config.find_interpreters()
    yield config.setting("python")
    yield config.setting("wait", default=call.environment.lock_timeout)
    yield from config.list_limits(call.stack, output.warn)
    for verb in VERBS:
        for setting, action in defaults_of(config, verb, parser_of(verb)):
            if setting.origin != "default":
                converted(config, setting, action)
            if setting.keys[0] == verb:
                yield setting


def _show(done: Settings) -> None:
    output.show_table(COLUMNS, done.settings)
    output.show_lines(["", *(f"{one.origin}: {one.path}{'' if one.exists else ' (missing)'}" for one in done.files)])


def _origin(setting: Setting) -> str:
    return setting.variable or f"{setting.origin}{'' if setting.line is None else f':{setting.line}'}"


def _text(value: Value) -> str:
    if isinstance(value, tuple):
        value = " ".join(value)
    return output.DASH if value in (None, "") else str(value).lower() if isinstance(value, bool) else str(value)


COLUMNS: Final[tuple[output.Column[Setting], ...]] = (
    output.Column("setting", lambda setting: setting.key),
    output.Column("value", lambda setting: _text(setting.value)),
    output.Column("from", _origin),
)
