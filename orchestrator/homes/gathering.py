"""One verb in several homes: what each child answered, and the sums."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final

from cachectl.homes.accounts import Account
from cachectl.homes.child import NO_HOME, Answer, ask
from cachectl.homes.untrusted import BadAnswer, document_of
from cachectl.layers.base.as_json import AsJson
from cachectl.layers.base.errors import CachectlError
from cachectl.layers.base.lazy import regex
from cachectl.layers.base.texts import printable

#: The class of each verb's document.
VERBS: Final = {
    "report": "cachectl.inspecting.report:Report",
    "ls": "cachectl.inspecting.entries:Listing",
    "verify": "cachectl.inspecting.verify:Verification",
    "doctor": "cachectl.inspecting.doctor:Diagnosis",
    "purge": "cachectl.clearing.purge:PurgeResult",
    "prune": "cachectl.clearing.purge:PurgeResult",
}
#: What is summed, by the list that a document has, and the numbers in its items; the length of a list counts.
_SUMS: Final = {
    "cachectl/report/1": ("layers", ("entries", "files", "bytes")),
    "cachectl/ls/1": ("entries", ("bytes",)),
    "cachectl/findings/1": ("findings", ()),
    "cachectl/purge/1": ("layers", ("removed", "orphans_removed", "bytes_freed", "skipped", "failed")),
}
#: Seconds that a home may take.
TIME_LIMIT: Final = 600.0
#: Children at a time: most of their time is spent waiting for a disk.
_MOST_AT_ONCE: Final = 8
_MOST_LAYERS: Final = 200
#: How a line of an error begins.
_SPEAKER: Final = regex(r"^cachectl(?: \w+)?: ")
#: How many lines of a child's standard error are kept.
_MOST_NOTES: Final = 3
_MOST_ERRORS: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class InHome:
    """The document of a verb in one home, as JSON values; ``error`` is the reason if there is none.

    ``status`` is the exit status, ``notes`` are lines of standard error. All of it is the word of that user.
    """

    user: str
    home: Path
    document: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    status: int = 0
    notes: tuple[str, ...] = ()
    as_json: ClassVar[AsJson] = AsJson(flat=("document",), optional=("error",), hidden=("status", "notes"))

    @property
    def items(self) -> Sequence[Mapping[str, Any]]:
        """Return the entries, findings or layers of the document."""
        schema = self.document.get("schema", "")
        items: Sequence[Mapping[str, Any]] = self.document[_SUMS[schema][0]] if schema in _SUMS else ()
        return items


@dataclass(frozen=True, slots=True)
class Homes:
    """What a verb gave in each home."""

    verb: str
    users: tuple[InHome, ...]
    as_json: ClassVar[AsJson] = AsJson("cachectl/homes/1", also=("total", "complete"))

    @property
    def total(self) -> Mapping[str, int]:
        """Return the number of homes, of those that failed, of their entries or findings, and the sums of numbers.

        They are lower bounds unless ``complete``.
        """
        sums = {"homes": len(self.users), "homes_failed": sum(one.error is not None for one in self.users)}
        for one in self.users:
            if one.error is None:
                counted, numbers = _SUMS[one.document["schema"]]
                if counted != "layers":
                    sums[counted] = sums.get(counted, 0) + len(one.items)
                for number in numbers:
                    sums[number] = sums.get(number, 0) + sum(_amount(item[number]) for item in one.items)
        return sums

    @property
    def complete(self) -> bool:
        """Return whether every home answered and everything in it could be counted."""
        return all(one.error is None and one.document.get("total", {}).get("complete", True) for one in self.users)

    @property
    def failed(self) -> bool:
        """Return whether any home failed, or any child had another status than 0."""
        return any(one.error is not None or one.status for one in self.users)


def gather(verb: str, accounts: Iterable[Account], *, time_limit: float = TIME_LIMIT, **options: object) -> Homes:
    """Carry out a verb in the home of each account, as its user; a home that fails stops no other.

    ``options`` are those of the command line: ``layers=("pocl",)``, ``older_than="30d"``, ``dry_run=True``. Each home
    may take ``time_limit`` seconds. Needs the rights of the superuser.
    """
    from concurrent.futures import ThreadPoolExecutor
    from threading import Event

    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise CachectlError("only the superuser can become other users; do it as root")
    words = (verb, *words_of({**options, "json": True}))
    stop = Event()

    def in_home(account: Account) -> InHome | None:
        return understood(account, verb, ask(account, words, seconds=time_limit, stop=stop))

    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        waiting = [pool.submit(in_home, account) for account in accounts]
        try:
            done = [one.result() for one in waiting]
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return Homes(verb, tuple(one for one in done if one is not None))


def words_of(options: Mapping[str, object]) -> Iterator[str]:
    """Yield the words of the command line that give options to a verb; ``layers`` are its arguments."""
    layers: Iterable[str] = ()
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "layers":
            layers = value if isinstance(value, (list, tuple)) else ()
        elif value is True:
            yield flag
        elif isinstance(value, (list, tuple)):
            yield from (f"{flag}={one}" for one in value)
        elif value is not None and value is not False:
            yield f"{flag}={value}"
    yield from ("--", *layers) if layers else ()


def understood(account: Account, verb: str, answer: Answer) -> InHome | None:
    """Return what a child's answer says; ``None`` if its home is not there and need not be."""
    notes = _lines(answer.errors)
    error = answer.problem
    document: Mapping[str, Any] = {}
    if error is None and answer.status == NO_HOME and not answer.output:
        if account.optional:
            return None
        error = f"its home {account.home} does not exist"
    elif error is None and answer.status < 0:
        error = f"was ended by signal {-answer.status}"
    elif error is None and not answer.output:
        error = notes[-1] if notes else f"ended with status {answer.status} and no answer"
    elif error is None:
        module, _, name = VERBS[verb].partition(":")
        try:
            document = document_of(getattr(import_module(module), name), answer.output)
            _demand_few_layers(document)
        except BadAnswer as bad:
            error = str(bad)
    return InHome(account.user, account.home, document, error, answer.status, () if error else notes[:_MOST_NOTES])


def _demand_few_layers(document: Mapping[str, Any]) -> None:
    """Raise :class:`BadAnswer` for more layers than any installation has: each is a row of a table."""
    if len(document.get("layers", ())) > _MOST_LAYERS:
        raise BadAnswer(f"its answer has more than {_MOST_LAYERS} layers")


def _lines(errors: bytes) -> tuple[str, ...]:
    lines = errors[-_MOST_ERRORS:].decode(errors="replace").splitlines()
    return tuple(printable(_SPEAKER.sub("", line))[:1000] for line in lines if line.strip())


def _amount(value: Any) -> int:  # noqa: ANN401 - a number, a list, or unknown
    return len(value) if isinstance(value, list) else value or 0


#: The verbs by name, each with accounts and options as :func:`gather` takes them.
report = partial(gather, "report")
ls = partial(gather, "ls")
verify = partial(gather, "verify")
doctor = partial(gather, "doctor")
purge = partial(gather, "purge")
prune = partial(gather, "prune")
