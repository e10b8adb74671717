"""States in which MIOpen 3.3.0's own code was run, and what doctor and verify say there: as much as MIOpen shows.

The code of ``src/binary_cache.cpp``, ``src/kern_db.cpp``, ``src/find_db.cpp``, ``src/ramdb.cpp`` and
``src/lock_file.cpp`` was compiled for the CPU. A comment quotes what it printed.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from support.layers import environment_of, sql, write
from support.miopen_kernels import ARGS, CODE, FIND, NAME, TABLE_2_3, VERSION, library_bytes, packed, store, user_file
from tiers import as_root, thorough

from cachectl.layers.core.finding import FAILS, HARMLESS, HEALS, RECOMPILES, RISKS, UNSAFE, Finding, Severity
from cachectl.listing import Findings
from cachectl.stack import Stack
from cachectl.verbs.doctor import doctor
from cachectl.verbs.verify import verify

NOBODY = 65534
OTHER = 54321


class Left(NamedTuple):
    """A home, and the databases of kernels and of tuning results that MIOpen left there."""

    home: Path
    kernels: Path
    tuning: Path


class World(NamedTuple):
    """A state of a home that is nobody's: what makes it (and returns variables), the layer, the verb, its findings."""

    name: str
    make: Callable[[Left], Mapping[str, str] | None]
    layer: str
    verb: Callable[..., Findings]
    findings: tuple[tuple[str, Severity], ...] = ()


def seeded(home: Path) -> Left:
    """Make the databases that MIOpen leaves, as nobody's."""
    kernels, tuning = store(user_file(home), {(NAME, ARGS): packed(CODE)}, wal=True), home / ".config/miopen" / FIND
    write(tuning, "k1=GemmFwdRest:1.5,64,miopenConvolutionFwdAlgoGEMM\n")
    give(home)
    return Left(home, kernels, tuning)


def give(*paths: Path, to: int = NOBODY) -> None:
    for path in paths:
        for each in (path, *path.rglob("*")):
            os.chown(each, to, to, follow_symlinks=False)


def lock_file(home: Path) -> Path:
    digest = hashlib.md5(os.fsencode(home / ".config/miopen")).hexdigest()  # noqa: S324 - MIOpen's choice
    path = home / "tmp/miopen-lockfiles" / f"{digest}_{FIND}.lock"
    path.parent.mkdir()
    path.touch()
    return path


@contextmanager
def acting_as(user: int) -> Iterator[None]:
    os.setresgid(user, user, 0)
    os.setresuid(user, user, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


def empty_version_folder(left: Left) -> None:
    left.kernels.unlink()
    give(left.kernels.parent, to=OTHER)


def kernels_with_mode(mode: int, left: Left) -> None:
    left.kernels.chmod(mode)


def kernels_of_another(left: Left) -> None:
    give(left.kernels, to=OTHER)


def companions(mode: int, left: Left) -> None:
    for suffix in ("-wal", "-shm"):
        path = left.kernels.with_name(left.kernels.name + suffix)
        path.touch(mode)
        give(path, to=OTHER)


def hot_journal(left: Left) -> None:
    sql(left.kernels, "PRAGMA journal_mode=DELETE")
    journal = left.kernels.with_name(left.kernels.name + "-journal")
    journal.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(504))
    give(journal, to=OTHER)


def dangling_link(left: Left) -> None:
    left.kernels.unlink()
    left.kernels.symlink_to(left.home / "missing/x.ukdb")


def other_table(statement: str, left: Left, version: str = VERSION) -> None:
    sql(left.kernels, f"DROP TABLE kern_db; {statement}")
    left.kernels.parent.rename(left.kernels.parent.with_name(version))


def system_without_table(left: Left) -> Mapping[str, str]:
    path = left.home / "db/gfx90a.kdb"
    path.parent.mkdir()
    sql(path, FOREIGN)
    path.chmod(0o644)
    return {"MIOPEN_SYSTEM_DB_PATH": str(path.parent)}


def no_tuning_folder(left: Left) -> None:
    left.tuning.unlink()
    left.tuning.parent.rmdir()
    give(left.tuning.parent.parent, to=OTHER)


def closed_tuning_folder(left: Left) -> None:
    give(left.tuning.parent, to=OTHER)


def tuning_of_another(left: Left) -> None:
    give(left.tuning, to=OTHER)
    left.tuning.chmod(0o666)


def temporary_of_another(left: Left) -> Mapping[str, str]:
    tuning_of_another(left)
    (left.home / ".config").rename(left.home / "tmp/.config")
    return {"HOME": ""}


def leftover_of_another(left: Left) -> None:
    leftover = left.tuning.with_name(f"{FIND}.temp")
    leftover.touch(0o644)
    give(leftover, to=OTHER)


def closed_lock_folder(left: Left) -> None:
    folder = left.home / "tmp/miopen-lockfiles"
    folder.mkdir()
    give(folder, to=OTHER)


def closed_lock_folder_with_the_file(left: Left) -> None:
    lock = lock_file(left.home)
    give(lock.parent, to=OTHER)
    lock.chmod(0o777)


def closed_lock(left: Left) -> None:
    give(lock_file(left.home), to=OTHER)


def file_for_locks(left: Left) -> None:
    (left.home / "tmp/miopen-lockfiles").touch()


def missing_temporary_folder(left: Left) -> Mapping[str, str]:
    return {"TMPDIR": str(left.home / "missing")}


def tuning_text(text: str, left: Left) -> None:
    left.tuning.write_text(text)


def fine(left: Left) -> None:
    give(lock_file(left.home).parent)


FOREIGN, OTHER_COLUMNS = "CREATE TABLE other(a, b)", "CREATE TABLE kern_db(a, b)"
KERNELS, SYSTEM, TUNING = "miopen", "miopen-system", "miopen-tuning"
USUAL = (
    # A new kernel: "attempt to write a readonly database"; a known one is a hit.
    World("kernels of another", kernels_of_another, KERNELS, doctor, (("closed", RISKS),)),
    # It says "no such column: kernel_name"
    World("other columns", partial(other_table, OTHER_COLUMNS), KERNELS, verify, (("columns", FAILS),)),
    # It says "Error creating file </tmp/miopen-lockfiles/MD5_….lock> for locking."
    World("closed lock folder", closed_lock_folder, TUNING, doctor, (("closed", FAILS),)),
    World("fine", fine, TUNING, doctor),
)
OTHERS = (
    # It says "Cannot open database file:…/gfx90a68.ukdb"
    World("empty version folder", empty_version_folder, KERNELS, doctor, (("closed", FAILS),)),
    World("read-only kernels", partial(kernels_with_mode, 0o444), KERNELS, doctor, (("closed", RISKS),)),
    World("unreadable kernels", partial(kernels_with_mode, 0), KERNELS, verify, (("unreadable", FAILS),)),
    World("dangling link", dangling_link, KERNELS, verify, (("no-file", FAILS),)),
    # The owner's new kernels, after another user has read: "attempt to write a readonly database"
    World("log of a reader", partial(companions, 0o644), KERNELS, doctor, (("closed", RISKS),)),
    # It says "unable to open database file"
    World("unreadable log", partial(companions, 0o600), KERNELS, doctor, (("closed", FAILS),)),
    # It says "attempt to write a readonly database", hits too
    World("hot journal", hot_journal, KERNELS, doctor, (("closed", FAILS),)),
    # MIOpen adds its table.
    World("foreign table for a run", partial(other_table, FOREIGN), KERNELS, doctor),
    World("foreign table", partial(other_table, FOREIGN), KERNELS, verify, (("foreign", HARMLESS),)),
    # It says "SQLite prepare error: … no such column: kernel_hash"
    World("old columns", partial(other_table, TABLE_2_3), KERNELS, verify, (("columns", FAILS),)),
    # The version that has these columns.
    World("own columns", partial(other_table, TABLE_2_3, version="2.3.0"), KERNELS, verify, (("unknown", HARMLESS),)),
    # It says "Invalid fields in table: kern_db disabling access to …", then "no such table: kern_db" at each miss
    World("system without table", system_without_table, SYSTEM, verify, (("columns", RISKS),)),
    # It says "filesystem error: cannot create directories: Permission denied […/.config/miopen]"
    World("no tuning folder", no_tuning_folder, TUNING, doctor, (("closed", FAILS),)),
    # It says "File is unwritable: …", and the result is not stored
    World("closed tuning folder", closed_tuning_folder, TUNING, doctor, (("closed", RECOMPILES),)),
    # It says "terminate called without an active exception": a result is appended, then the mode cannot be set.
    World("tuning of another", tuning_of_another, TUNING, doctor, (("closed", RISKS),)),
    World("temporary of another", temporary_of_another, TUNING, doctor, (("closed", RISKS),)),
    # It says "Temp file is unwritable: ….temp"
    World("leftover of another", leftover_of_another, TUNING, doctor, (("closed", RECOMPILES),)),
    # MIOpen opens the lock file that is there.
    World("lock in a closed folder", closed_lock_folder_with_the_file, TUNING, doctor),
    # It says "lock initialization failed. Error code: 3. Native error: 13. Description: 'Permission denied'"
    World("closed lock", closed_lock, TUNING, doctor, (("closed", FAILS),)),
    # It says "Error creating file <…> for locking."
    World("file for locks", file_for_locks, TUNING, doctor, (("no-folder", FAILS),)),
    # It says "temp_directory_path: No such file or directory"
    World("missing temporary folder", missing_temporary_folder, TUNING, doctor, (("no-folder", FAILS),)),
    # It says "Ill-formed record: key not found"; what MIOpen finds again is stored and read.
    World("line without key", partial(tuning_text, "garbage\nk1=S:1,2,3\n"), TUNING, verify, (("malformed", HEALS),)),
    # It says "Error parsing payload under the key", also after MIOpen has stored the result behind it
    World("line without value", partial(tuning_text, "k1=\n"), TUNING, verify, (("malformed", RECOMPILES),)),
    # The next record is joined to it, and stored again by the run after that.
    World("line without end", partial(tuning_text, "k1=S:1,2,3"), TUNING, verify, (("newline", HEALS),)),
)


@as_root
@pytest.mark.parametrize(
    "world",
    [*USUAL, *thorough(*((world,) for world in OTHERS))],
    ids=lambda world: world.name,
)
def test_a_state_is_as_serious_as_miopen_takes_it(world: World, open_folder: Path) -> None:
    # "nobody" may not be able to read the modules of every Python, so they are imported before.
    ask(world, open_folder / "other", 0)
    found = ask(world, open_folder / "home", NOBODY)
    told = [(finding.code, finding.severity) for finding in found if finding.severity is not UNSAFE]
    assert sorted(told, key=str) == sorted(world.findings, key=str), found


def ask(world: World, home: Path, user: int) -> tuple[Finding, ...]:
    """Make a world, and return what a user sees there."""
    (home / "tmp").mkdir(parents=True)
    write(home / "lib/libMIOpen.so.1", library_bytes(VERSION))
    variables = {"LD_LIBRARY_PATH": str(home / "lib"), **(world.make(seeded(home)) or {})}
    os.chown(home, NOBODY, NOBODY)
    stack = Stack(environment_of(home, **variables))
    with acting_as(user):
        return world.verb(stack, [world.layer]).findings
