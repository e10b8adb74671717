"""``--user`` and ``--all-users``: run the verb in a child process for each user, and show all answers in one table.

A child becomes the user before Python starts, and is isolated (``-I``). It writes one row per line. Its user can stop
it and write in its name, so the parent reads an answer of limited size for a limited time, and accepts only numbers and
escaped texts.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cachectl import verbs
from cachectl.layers.base.documents import parse_json
from cachectl.layers.base.errors import PARSE_ERRORS, BadRequest, CachectlError
from cachectl.layers.base.text import plural, printable
from cachectl.layers.core.json_form import as_json
from cachectl.show import units
from cachectl.show.table import Table

if TYPE_CHECKING:
    import pwd

_CHILD = "from cachectl.cli import main, output; raise SystemExit(main.main(show_json=output.show_rows))"
#: The most bytes of an answer and of a row, seconds for a child, and lines of its standard error that are shown.
_LARGEST_ANSWER = 2 << 20
_LARGEST_ROW = 64 << 10
_SECONDS = 60
_MOST_NOTES = 3
#: How deep an answer may be nested, and how long a text in a table may be.
_DEEPEST = 12
_LONGEST = 200
_LOGIN_DEFS = Path("/etc/login.defs")

#: An answer: the document of the verb with ``user`` and ``error``, the exit status, and other lines. The user wrote it.
_Answer = tuple[Mapping[str, Any], int, list[str]]


def _number(item: Mapping[str, Any], name: str) -> int | None:
    """Return a number as an integer, or the length of a list; ``None`` for anything else."""
    value = item.get(name)
    number = len(value) if isinstance(value, list) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    return int(number) if 0 <= number < 1 << 62 else None


def _text(item: Mapping[str, Any], name: str) -> str:
    """Return a text, or the joined texts of a list or an object; a dash if empty."""
    value = item.get(name)
    if isinstance(value, Mapping):
        value = [f"{key} {text}" for key, text in value.items()]
    return " ".join(map(str, value)) if isinstance(value, list) and value else str(value or units.DASH)


def run(request: verbs.Request) -> int:
    """Carry out the verb for each user, show all answers, return the exit status. Raises :class:`CachectlError`."""
    if not hasattr(os, "geteuid") or os.geteuid():
        raise CachectlError("only root can become other users: sudo cachectl …")
    options = vars(request.options)
    for name in filter(options.get, ("html", "quiet")):
        request.misuse(f"--{name} works for one user only; drop --user or --all-users")
    shown: verbs.OfUsers = import_module(f"cachectl.verbs.{request.options.verb}").of_users(request.options)
    words, answers = list(_words(request.words)), list[_Answer]()
    with request.output.progress() as step:
        for user in (accounts := _users(options["user"])):
            step(len(answers), f"reading the caches of {user.pw_name}", len(accounts))
            answers.append(_ask(user, words, shown.items))
    documents = [document for document, _, _ in answers]
    failures = [document["error"] for document in documents]
    if answers and len(set(failures)) == 1 and all(status == 2 for _, status, _ in answers):  # noqa: PLR2004
        raise BadRequest(str(failures[0]))
    show(request, documents, shown)
    for document, _, notes in answers:
        for line in (document["error"], *notes):
            if line:
                request.notice(f"{document['user']}: {line}")
    return int(any(failures) or any(status for _, status, _ in answers))


@as_json("cachectl/users/1")
class Answers(NamedTuple):
    """The documents of a verb, with their ``user`` and an ``error`` or ``None``; incomplete sums are lower bounds."""

    users: Sequence[Mapping[str, object]]
    total: Mapping[str, int]
    complete: bool


#: The items of one line of the table, each with its user.
_Line = list[tuple[str, Mapping[str, object]]]


def _lines(documents: list[Mapping[str, Any]], shown: verbs.OfUsers) -> list[_Line]:
    """Return the items of each line, in order; empty layers are excluded."""
    lines: dict[tuple[str, ...], _Line] = {}
    for document in documents:
        user = document["user"]
        for item in document.get(shown.items, ()):
            if shown.items != "layers" or any(_number(item, name) for name in shown.numbers):
                texts = [_text(item, name) for name in shown.same or shown.texts]
                lines.setdefault((user if shown.numbers else "", *texts), []).append((user, item))
    if shown.order in shown.numbers:
        return sorted(lines.values(), key=lambda line: -(_sum(line, shown.order) or 0))
    # The oldest first; lines without a time come last.
    return sorted(lines.values(), key=lambda line: _number(line[0][1], shown.order) or sys.maxsize)


def _sum(line: _Line, name: str) -> int | None:
    """Return the sum of a number; ``None`` if it is unknown for all items."""
    numbers = [number for _, item in line if (number := _number(item, name)) is not None]
    return sum(numbers) if numbers else None


def show(request: verbs.Request, documents: list[Mapping[str, Any]], shown: verbs.OfUsers) -> None:
    """Print all answers in the requested form."""
    texts, numbers, rows, harmless = shown.texts, shown.numbers, [], 0
    for line in _lines(documents, shown):
        item = line[0][1]
        is_harmless = item.get("severity") == "harmless" and item.get("code") not in ("damaged", "unknown")
        if is_harmless and shown.same != texts:
            harmless += len(line)
            continue
        users = ", ".join(units.examples([*dict.fromkeys(user for user, _ in line)]))
        sums = [_sum(line, name) for name in numbers] if numbers else [len(line)]
        rows.append([users, *(_text(item, name)[:_LONGEST] for name in texts), *sums])
    total = {name: sum(row[place] or 0 for row in rows) for place, name in enumerate(numbers, 1 + len(texts))}
    totals = [document.get("total") if document["error"] is None else {"complete": False} for document in documents]
    complete = all(not isinstance(sums, dict) or sums.get("complete", True) is True for sums in totals)
    if request.form == "json":
        request.output.show_json(Answers(documents, total, complete))
        return
    columns: dict[str, Callable[[Any], str]] = dict.fromkeys(("user", *texts), str)
    last: list[str] = []
    for name in numbers:
        unit = units.size if "bytes" in name else units.count
        # A dry run removes nothing.
        columns["would go" if name == "removed" and request.options.dry_run else name] = unit
        last.append(unit(total[name]) + ("" if complete else "+"))
    if not numbers:
        columns["times"] = units.count
    table = Table(columns, rows, ("total", *("" for _ in texts), *last) if numbers else ())
    if request.form == "csv":
        request.output.show_csv(table)
    else:
        request.output.say([table, *([f"{plural(harmless, 'harmless finding')}: -v shows all"] if harmless else [])])


def _words(typed: list[str]) -> Iterator[str]:
    words = iter(typed)
    # --json must come before a --, which ends the options.
    yield from (next(words), "--json")
    for word in words:
        if word == "--user":
            next(words)
        elif word not in ("--json", "--csv", "--all-users") and not word.startswith("--user="):
            yield word


def _users(names: list[str]) -> list[pwd.struct_passwd]:
    """Return the accounts with these names, or of all people: ``UID_MIN`` to ``UID_MAX`` in login.defs(5)."""
    import pwd

    if names:
        accounts = []
        for name in dict.fromkeys(names):
            try:
                accounts.append(pwd.getpwnam(name))
            except KeyError as error:  # noqa: PERF203
                raise BadRequest(f"unknown user {name!r}; getent passwd lists accounts") from error
        return accounts
    text = _LOGIN_DEFS.read_text(errors="replace") if _LOGIN_DEFS.exists() else ""
    bounds = dict(re.findall(r"(?m)^(UID_M(?:IN|AX))\s+(\d{1,10})\b", text))
    people = range(int(bounds.get("UID_MIN", 1000)), int(bounds.get("UID_MAX", 60000)) + 1)
    # Several names can share one user ID and home.
    accounts_by_home = {(user.pw_uid, user.pw_dir): user for user in reversed(pwd.getpwall()) if user.pw_uid in people}
    return [user for user in reversed(accounts_by_home.values()) if os.path.isdir(user.pw_dir)]


def _ask(user: pwd.struct_passwd, words: list[str], items: str) -> _Answer:
    """Run a verb as a user; return its answer, in which ``items`` is a list of objects."""
    status, data, said, error = _run(user, words)
    document: dict[str, Any] = {}
    lines = said.decode(errors="replace").splitlines()
    notes = [printable(re.sub(r"^cachectl(?: \w+)?: ", "", line))[:1000] for line in lines if line.strip()]
    if error is None and status < 0:
        error = f"was ended by signal {-status}"
    elif error is None and not data:
        error = notes[-1] if notes else f"ended with status {status} and no answer"
        if "No module named 'cachectl" in error or "No module named 'encodings" in error:
            error += "; install cachectl where every user can read it"
    elif error is None:
        try:
            document, cut = _read(data)
            # Raises TypeError if it is not a list of objects.
            document[items] = [{**item} for item in document[items]]
        except PARSE_ERRORS:
            document, error = {}, f"did not write a valid document of {words[0]}"
        else:
            limits = f"a row has at most {_LARGEST_ROW >> 10} KiB, an answer {_LARGEST_ANSWER >> 20} MiB"
            error = f"{plural(cut, 'row')} cut: {limits}; select fewer entries" if cut else None
    return {**document, "user": user.pw_name, "error": error}, status, [] if error else notes[:_MOST_NOTES]


def _read(data: bytes) -> tuple[dict[str, Any], int]:
    """Return the document of an answer, and the number of missing rows. Raises one of ``PARSE_ERRORS``."""
    # The last line is empty, or was cut.
    head, *lines = data.split(b"\n")[:-1]
    document = dict(_escaped(parse_json(head), _DEEPEST))
    counts = {name: int(count) for name, count in document.pop("rows").items()}
    document.update((name, []) for name in counts)
    for line in lines:
        if len(line) <= _LARGEST_ROW:
            ((name, item),) = _escaped(parse_json(line), _DEEPEST).items()
            document[name].append(item)
    return document, max(0, sum(count - len(document[name]) for name, count in counts.items()))


def _escaped(value: Any, depth: int) -> Any:  # noqa: ANN401 - JSON
    if not depth:
        raise ValueError(value)
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_escaped(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return {printable(key): _escaped(item, depth - 1) for key, item in value.items()}
    return value


def _run(user: pwd.struct_passwd, words: list[str]) -> tuple[int, bytes, bytes, str | None]:
    """Return the status of a child, its output, its standard error, and why the output is incomplete, if it is."""
    own = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
    try:
        child = subprocess.Popen(  # noqa: S603 - our own program
            (sys.executable, "-I", "-X", "utf8", "-c", _CHILD, *words),
            env={**own, "PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=os.getgrouplist(user.pw_name, user.pw_gid),
            umask=0o077,
            start_new_session=True,
        )
    except OSError as error:
        return -1, b"", b"", f"cannot start {printable(sys.executable)} as that user: {error.strerror}"
    streams = {stream: bytearray() for stream in (child.stdout, child.stderr) if stream is not None}
    written, problem, deadline = [*streams.values()], None, time.monotonic() + _SECONDS
    is_full = False
    try:
        # It prints only when it has finished, so an answer that is cut still says how many rows there are.
        while streams and problem is None and not is_full:
            for stream in select.select([*streams], (), (), 1)[0]:
                piece = os.read(stream.fileno(), 1 << 16)
                streams[stream] += piece
                is_full = is_full or len(streams[stream]) > _LARGEST_ANSWER
                if not piece:
                    del streams[stream]
                    stream.close()
            if time.monotonic() > deadline:
                problem = f"took longer than {_SECONDS} s"
        _wait(child, 0 if problem or is_full else 5)
    finally:
        if child.returncode is None:
            with suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            _wait(child, 5)
        for stream in streams:
            stream.close()
    status = 1 if is_full else child.returncode or 0
    return status, bytes(written[0]), bytes(written[1]), problem


def _wait(child: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for a child, but not forever: a user's file system may block it."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(seconds)
