"""``--home``, ``--user`` and ``--all-users``: the verbs in homes of other users, and one table for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.layers.base.texts import plural

if TYPE_CHECKING:
    from cachectl.homes import Account, Homes, InHome
    from cachectl.layers.base.facts import Entry

#: Options of the command line that no child gets, or that it gets anyway.
_OURS: Final = frozenset(
    {"verb", "parser", "home", "user", "all_users", "below", "time_limit", "json", "format", "color"}
)
#: Options that only shape what is printed here.
_SHOWN: Final = frozenset({"verbose", "all_layers"})
#: Options that mean nothing here, with the reason.
_REFUSED: Final = {
    "mpi": "--mpi looks at the caches of one user; leave it out",
    "html": "--html draws the caches of one user; leave it out",
    "quiet": "-q cannot say whose a key is; use --json",
}
#: How many findings of one user are printed.
_MOST_FINDINGS: Final = 20


_LONGEST_LAYER: Final = 30


class _Row(NamedTuple):
    """A row of a table: the user, and an item of his document."""

    user: str
    item: Mapping[str, Any]


def run(call: Call) -> int:
    """Carry out the verb in each home, show all of them together, and return the exit status."""
    from cachectl.homes import gather
    from cachectl.homes.gathering import TIME_LIMIT

    given = vars(call.options)
    for name, reason in _REFUSED.items():
        if given.get(name):
            call.misuse(reason)
    accounts = _accounts(given)
    options = {name: value for name, value in given.items() if name not in _OURS | _SHOWN}
    limit = TIME_LIMIT if given["time_limit"] is None else given["time_limit"]
    with output.working(f"looking into {plural(len(accounts), 'home')}"):
        homes = gather(given["verb"], accounts, time_limit=limit, **options)
    errors = {one.error for one in homes.users if one.status == 2}  # noqa: PLR2004 - wrong usage
    if len(errors) == 1 and all(one.error in errors for one in homes.users):
        output.warn(errors.pop() or "wrong usage")
        return 2
    if call.form == "json":
        output.show_json(homes)
    elif call.form == "jsonl":
        output.show_json_lines({"user": one.user, **item} for one in homes.users for item in one.items)
    elif call.form == "csv":
        call.misuse("CSV is for one home; use --format jsonl, which names the user of each line")
    else:
        _SHOW[homes.verb](homes, call.now)
    for one in homes.users:
        for line in (one.error, *one.notes):
            if line:
                output.warn(f"{one.user}: {line}")
    return 1 if homes.failed else 0


def _accounts(given: Mapping[str, Any]) -> tuple[Account, ...]:
    from cachectl.homes import account_of_home, accounts_of, every_account

    if given["home"] is not None:
        return (account_of_home(Path(given["home"])),)
    return every_account() if given["all_users"] else accounts_of(given["user"])


def _rows(homes: Homes) -> list[_Row]:
    return [_Row(one.user, item) for one in homes.users for item in one.items]


_USER: Final[output.Column[_Row]] = output.Column("user", lambda row: row.user)
#: A name that the user chose must not make the table wide for all.
_LAYER: Final[output.Column[_Row]] = output.Column("layer", lambda row: _layer(row.item))


def _layer(item: Mapping[str, Any]) -> str:
    return output.shorten(item["layer"], _LONGEST_LAYER)


def _of_item(key: str) -> Callable[[_Row], Any]:
    def value(row: _Row) -> Any:  # noqa: ANN401 - JSON
        found = row.item[key]
        return len(found) if isinstance(found, list) else found

    return value


def _last(homes: Homes, *keys: str) -> tuple[str, ...]:
    """Return the cells of the total, marked if they are lower bounds."""
    numbers = ((key, homes.total.get(key, 0)) for key in keys)
    cells = (output.size(number) if key.startswith("bytes") else output.count(number) for key, number in numbers)
    return ("total", "", *(cell if homes.complete else f"{cell}+" for cell in cells))


# ---------------------------------------------------------------------- report


_REPORT: Final[tuple[output.Column[_Row], ...]] = (
    _USER,
    _LAYER,
    output.counts("entries", _of_item("entries")),
    output.counts("files", _of_item("files")),
    output.sizes("size", _of_item("bytes")),
    output.sizes("stale", _of_item("stale_bytes")),
)


def _show_report(homes: Homes, now: float) -> None:
    del now
    rows = []
    for one in homes.users:
        held = [_Row(one.user, item) for item in one.items if item["files"] or item["entries"] or not item["complete"]]
        nothing = {"layer": output.DASH, "entries": 0, "files": 0, "bytes": 0, "stale_bytes": None}
        rows += held or ([] if one.error else [_Row(one.user, nothing)])
    output.show_table(_REPORT, rows, (*_last(homes, "entries", "files", "bytes"), ""))
    for one in homes.users:
        problems = [problem for item in one.items for root in item["roots"] for problem in root["problems"]]
        for problem in problems[: output.MANY]:
            output.show_message(f"{one.user}: {problem['path']}: {problem['message']}", indent="  ")
        if len(problems) > output.MANY:
            output.show_lines([f"{one.user}: {len(problems) - output.MANY} more problems; --json lists them all"])


# ---------------------------------------------------------------------- ls


def _show_ls(homes: Homes, now: float) -> None:
    _show_entries(((row.user, _entry(row.item)) for row in _rows(homes)), now)


def _show_entries(entries: Iterable[tuple[str, Entry]], now: float) -> None:
    from cachectl.cli.inspecting.ls import columns

    user: output.Column[tuple[str, Entry]] = output.Column("user", lambda row: row[0])
    output.show_table((user, *(column.of(_second) for column in columns(now))), entries)


def _second(row: tuple[str, Entry]) -> Entry:
    return row[1]


def _entry(item: Mapping[str, Any]) -> Entry:
    from cachectl.layers.base.facts import Entry

    fields = {name: value for name, value in item.items() if name not in ("because", "state")}
    return Entry(**{**fields, "layer": _layer(item)})


# ---------------------------------------------------------------------- verify, doctor


def _show_findings(nothing: str) -> Callable[[Homes, float], None]:
    def show(homes: Homes, now: float) -> None:
        del now
        for one in homes.users:
            for finding in one.items[:_MOST_FINDINGS]:
                where = finding["key"] if finding["key"] is not None else finding["root"]
                line = f"{one.user}: {finding['layer']}: {where}: {finding['message']} ({finding['severity']})"
                # These words are the user's, so nobody else should run the command.
                output.show_message(line, indent="  ")
                output.show_lines([f"  fix, as {one.user}: {finding['fix']}"])
            if len(one.items) > _MOST_FINDINGS:
                more = plural(len(one.items) - _MOST_FINDINGS, "finding")
                output.show_lines([f"{one.user}: {more} more; --json lists them all"])
        heard = sum(one.error is None for one in homes.users)
        if heard and not any(one.items for one in homes.users):
            output.show_lines([f"{nothing} in {plural(heard, 'home')}"])

    return show


def _warn_of_notes(one: InHome, item: Mapping[str, Any]) -> None:
    from cachectl.layers.base.facts import Note

    for kind in ("skipped", "failed"):
        notes = [Note(note["key"], note["because"]) for note in item[kind]]
        output.warn_notes(f"{one.user}: {item['layer']}: {kind}", notes)


# ---------------------------------------------------------------------- purge, prune


def _show_purge(homes: Homes, now: float) -> None:
    listed = [
        (one.user, _entry(entry))
        for one in homes.users
        for item in one.items
        for entry in item.get("entries", ())
        if entry["state"] != "orphan"
    ]
    if listed:
        _show_entries(listed, now)
        output.show_lines([""])
    dry_run = any(one.document.get("dry_run") for one in homes.users)
    columns: tuple[output.Column[_Row], ...] = (
        _USER,
        _LAYER,
        output.counts("would go" if dry_run else "removed", _of_item("removed")),
        output.counts("orphans", _of_item("orphans_removed")),
        output.sizes("size", _of_item("bytes_freed")),
        output.counts("skipped", _of_item("skipped")),
    )
    touched = [
        row
        for row in _rows(homes)
        if any(row.item[key] for key in ("removed", "orphans_removed", "bytes_freed", "skipped"))
    ]
    output.show_table(columns, touched, _last(homes, "removed", "orphans_removed", "bytes_freed", "skipped"))
    for one in homes.users:
        for item in one.items:
            _warn_of_notes(one, item)


_SHOW: Final[Mapping[str, Callable[[Homes, float], None]]] = {
    "report": _show_report,
    "ls": _show_ls,
    "verify": _show_findings("no damage found"),
    "doctor": _show_findings("nothing is wrong"),
    "purge": _show_purge,
    "prune": _show_purge,
}
