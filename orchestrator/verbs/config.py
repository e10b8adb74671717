"""``cachectl config``: what is set, and where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from cachectl.options import FORM, Request
from cachectl.table import Column, Table, Whole

if TYPE_CHECKING:
    from cachectl.config import Config, ConfigEntry

OPTIONS: Final = (FORM,)


def run(request: Request) -> Config:
    """Carry out ``cachectl config``. Raises :class:`BadConfig` and :class:`ConfigRefused`."""
    return request.config


def _text(setting: ConfigEntry) -> str:
    if isinstance(setting.value, tuple):
        return " ".join(setting.value)
    return str(setting.value).lower() if isinstance(setting.value, bool) else str(setting.value)


_COLUMNS: Final[tuple[Column[ConfigEntry], ...]] = (
    Column("setting", lambda setting: setting.key),
    Column("value", _text),
    Column("from", lambda setting: str(setting.path)),
)


def table(done: Config, _request: Request) -> Table[ConfigEntry]:
    """Return the settings."""
    return Table(_COLUMNS, done.settings)


def show(done: Config, request: Request) -> Iterator[object]:
    """Yield the settings, and where files are looked for."""
    yield table(done, request) if done.settings else "nothing is set"
    yield ""
    for place in done.files:
        yield Whole(f"{place.origin}: {place.path}{'' if place.exists else ' (missing)'}")
