"""The store of NEO's cache: a file for each program, the driver's account of their sizes, and its debugging aids.

The contents are in :mod:`cachectl.layers.formats.neo_binaries`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final

from cachectl.layers import neo
from cachectl.layers.base import errors, facts, lazy
from cachectl.layers.base.store import Codec, Damage, counting, finding_of, unreadable
from cachectl.layers.disk import atomic, locks, plain, presence
from cachectl.layers.formats import details, neo_binaries
from cachectl.layers.stores import files, tree

ACCOUNT: Final = "config.file"
_DIGIT: Final = lazy.regex("[0-9a-f]")
_ENTRY: Final = lazy.regex(r"[0-9a-f]{16}\.(?:cl|l0|ocloc)_cache")
_BOOKS: Final = lazy.regex(r"stats|config\.file|[0-9a-f]{16}\.(?:trace|input)")
_TEMPORARY: Final = tree.OrphanRule(lazy.regex(r"cl_cache\.[A-Za-z0-9]{6}"), "left by a killed driver", private=True)
_FLAT: Final = tree.Shape((_ENTRY,), folders=False, orphans=(_TEMPORARY,))
_DEEP: Final = tree.Shape((_DIGIT, _DIGIT, _ENTRY), folders=False)
_NEVER: Final = "the driver compiles it again at every run, and never replaces it"


class NeoCodec(Codec):
    """A program: zebin, SPIR-V, or the driver's wrapper around a device binary."""

    form = "neo-entry/1"

    def describe(self, data: bytes) -> details.Details:
        """Read a program of any kind."""
        return neo_binaries.describe(data)

    def check(self, data: bytes) -> Damage | None:
        """Check that an entry is a whole program."""
        wrong = neo_binaries.complaint(data)
        if wrong is None:
            return None
        if not data or neo_binaries.is_wrapper(data):
            return Damage(facts.Severity.RECOMPILES, f"{wrong}; {_NEVER}")
        return Damage(facts.Severity.FAILS, f"{wrong}; the driver takes it for a program, and the build fails")


class Account(files.Index):
    """The sum of the entries' bytes, which the driver keeps under a lock, and its debugging aids."""

    # The account and debugging aids are at the top, statistics at each level.
    shapes = (
        tree.Shape((_BOOKS,), folders=False),
        tree.Shape((_DIGIT, lazy.regex(neo.STATISTICS)), folders=False),
        tree.Shape((_DIGIT, _DIGIT, lazy.regex(neo.STATISTICS)), folders=False),
    )

    def is_book(self, leaf: tree.Leaf) -> bool:
        """Compare the length with that of the driver's files."""
        name = leaf.key.rpartition("/")[2]
        if name == neo.STATISTICS:
            return leaf.bytes == neo_binaries.STATISTICS.size
        return name != ACCOUNT or leaf.bytes in (0, neo_binaries.ACCOUNT.size)

    @contextmanager
    def changing(self, store: files.Files, root: facts.Root) -> Iterator[bool]:
        """Hold the driver's lock around a change, then write the sum of all entries into the account.

        The sum is also written if the change fails. Raises :class:`Unsettled` where only that writing fails. Without an
        account, the driver counts the entries when it makes one. Yields whether the lock is held.
        """
        path = root.path / ACCOUNT
        with (
            locks.file_lock(store.name, path, lock_timeout=store.environment.lock_timeout) as handle,
            counting(store.name, path, partial(self._count, store, root, handle)),
        ):
            yield handle is not None

    def _count(self, store: files.Files, root: facts.Root, handle: int | None) -> None:
        if handle is None:
            return
        # A longer file is not the driver's.
        old = os.pread(handle, neo_binaries.ACCOUNT.size + 1, 0)
        new = neo_binaries.ACCOUNT.pack(sum(leaf.bytes for leaf in store.leaves(root)))
        if len(old) in (0, len(new)) and old != new:
            atomic.overwrite(handle, old, new)

    def verify(self, store: files.Files, root: facts.Root) -> Iterator[facts.Finding]:
        """Compare the account with the entries."""
        sizes: dict[str, int] = {}
        try:
            for leaf in store.leaves(root):
                kind = leaf.key.rpartition(".")[2]
                sizes[kind] = sizes.get(kind, 0) + leaf.bytes
            account = plain.read_plain(root.path / ACCOUNT, limit=neo_binaries.ACCOUNT.size + 1)
        except (errors.Unreachable, OSError) as error:
            if isinstance(error, errors.Unreachable) or not presence.means_no_file(error):
                yield finding_of(store, root, unreadable(root.path / ACCOUNT, error))
            return
        if (complaint := _account_complaint(account, sizes)) is not None:
            fix = "nothing: the next put or purge in this layer counts again"
            if len(account) != neo_binaries.ACCOUNT.size:
                fix = f"rm {shlex.quote(str(root.path / ACCOUNT))}"
            yield facts.Finding(store.name, root.path, ACCOUNT, facts.Severity.WASTES, "index", complaint, fix)


def _account_complaint(account: bytes, sizes: Mapping[str, int]) -> str | None:
    """Return what is wrong with the account, given the bytes of the entries of each kind.

    A driver that counts again counts only its own kind, so the account may be smaller than the sum.
    """
    if not account:
        return None
    if len(account) != neo_binaries.ACCOUNT.size:
        return "the account has another length than the driver gives it: it counts from a wrong number"
    (counted,) = neo_binaries.ACCOUNT.unpack(account)
    total = sum(sizes.values())
    if counted > total:
        return f"the account says {counted} bytes where there are {total}: the driver drops entries too early"
    if counted < min(sizes.values(), default=0):
        return f"the account says {counted} bytes where there are {total}: the cache grows beyond its limit"
    return None


def programs() -> files.Files:
    """Return the store, flat as older releases keep it and below two digits as newer ones do."""
    return files.Files(_FLAT, _DEEP, codec=NeoCodec(), index=Account(), writers=neo.LIBRARIES, unread=_NEVER)
