"""``cachectl store``: list, clean up or check a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cachectl.cli import output
from cachectl.cli.call import Call
from cachectl.cli.exchange.push import PLACES
from cachectl.cli.parser import Parser
from cachectl.layers.base.texts import plural

if TYPE_CHECKING:
    from cachectl.exchange.store import Collection, ListedKey, SharedStore, StoreCheck, StoreListing


def add_options(parser: Parser) -> None:
    actions = (
        "ls: what it holds, and its digest; gc: remove old entries, and later what nothing lists; verify: check all"
    )
    parser.add_argument("action", metavar="ls|gc|verify", choices=("ls", "gc", "verify"), help=actions)
    parser.add_argument("target", metavar="TARGET", help=PLACES)
    removing = parser.add_argument_group("gc")
    removing.add_argument("--older-than", metavar="AGE", help="remove what was pushed more than 30d, 12h, 2w ago")
    removing.add_argument("--max-size", metavar="SIZE", help="then remove the oldest until at most 500M, 2GiB stay")
    grace = "leave what nothing lists to readers for AGE before it is removed (default: 1d)"
    removing.add_argument("--grace", metavar="AGE", help=grace)
    removing.add_argument("-n", "--dry-run", action="store_true", help="list what would be removed, and touch nothing")
    parser.add_argument("--allowed-signers", metavar="LIST", help="verify: all must be signed by a signer of this list")
    parser.add_shared("--json")


def run(call: Call) -> int:
    given = call.options
    removing = (given.older_than, given.max_size, given.grace, given.dry_run)
    if given.action != "gc" and removing != (None, None, None, False):
        call.misuse("--older-than, --max-size, --grace and --dry-run are for store gc")
    if given.action != "verify" and given.allowed_signers is not None:
        call.misuse("--allowed-signers is for store verify")
    store = call.stack.store(call.target(given.target))
    if given.action == "gc":
        return _gc(call, store)
    with output.working("checking" if given.action == "verify" else "listing"):
        if given.action == "ls":
            listing = store.ls()
        else:
            check = store.verify(allowed_signers=given.allowed_signers)
    if given.action == "ls":
        return call.show(listing, lambda done: _show_listing(done, call.now))
    return call.show(check, _show_check)


def _gc(call: Call, store: SharedStore) -> int:
    from cachectl.layers.base.selection import parse_age, parse_size

    given = call.options
    with output.working("cleaning up"):
        done = store.gc(
            older_than=None if given.older_than is None else parse_age(given.older_than),
            max_size=None if given.max_size is None else parse_size(given.max_size),
            grace=None if given.grace is None else parse_age(given.grace),
            dry_run=given.dry_run,
        )
    return call.show(done, _show_collection)


def _columns(now: float) -> tuple[output.Column[ListedKey], ...]:
    return (
        output.Column("layer", lambda key: key.layer),
        output.counts("entries", lambda key: key.entries),
        output.sizes("size", lambda key: key.bytes),
        output.counts("parts", lambda key: key.parts),
        output.counts("unsigned", lambda key: key.unsigned),
        output.ages("newest", lambda key: key.newest, now),
        output.Column("for", _facts),
    )


def _facts(key: ListedKey) -> str:
    return ", ".join(f"{name} {value or output.DASH}" for name, value in key.portability_key.items())


def _show_listing(done: StoreListing, now: float) -> None:
    total: Final = done.total
    last = ("total", output.count(total.entries), output.size(total.bytes), output.count(total.parts), "", "", "")
    output.show_table(_columns(now), done.keys, last)
    output.show_lines(["", f"digest {done.digest}"])


def _show_collection(done: Collection) -> None:
    would = "would be " if done.dry_run else ""
    parts = plural(len(done.parts), "part")
    condemned, removed = (
        plural(number, "pack or object", "packs and objects") for number in (done.condemned, done.removed)
    )
    output.show_lines(
        [
            f"{parts} of the index with {plural(done.entries, 'entry', 'entries')} {would}removed",
            f"{condemned} {would}condemned: gc removes them after the grace period",
            f"{removed} {would}removed: {output.size(done.freed)}; {output.size(done.kept)} stay",
        ]
    )


def _show_check(done: StoreCheck) -> None:
    for one in done.findings:
        output.show_message(f"{one.severity}: {one.name}: {one.message}")
    index = f"{plural(done.entries, 'entry', 'entries')} in {plural(done.parts, 'part')} of the index"
    files = f"{plural(done.packs, 'pack')} and {plural(done.objects, 'object')}"
    output.show_lines([f"{index}, {files} checked", f"digest {done.digest}"])
