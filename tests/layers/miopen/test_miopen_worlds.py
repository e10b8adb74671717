"""States in which MIOpen 3.3.0's own code was run, and what doctor and verify say there: as much as MIOpen shows.

The code of ``src/binary_cache.cpp``, ``src/kern_db.cpp``, ``src/find_db.cpp``, ``src/ramdb.cpp`` and
``src/lock_file.cpp`` was compiled for the CPU. A comment quotes what it printed.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from support.layers import environment_of, sql
from support.miopen_kernels import ARGS, CODE, FIND, NAME, TABLE_2_3, library_bytes, packed, store, user_file
from tiers import as_root, thorough

from cachectl.layers.core.finding import FAILS, HARMLESS, HEALS, RECOMPILES, RISKS, UNSAFE, Finding, Severity
from cachectl.listing import Findings
from cachectl.stack import Stack
from cachectl.verbs.doctor import doctor
from cachectl.verbs.verify import verify

NOBODY = 65534
OTHER = 54321
Made = Callable[[Path], Mapping[str, str] | None]


class World(NamedTuple):
    """A state of a home that is nobody's: what makes it (and returns variables), the layer, the verb, its findings."""

    make: Made
    layer: str
    verb: Callable[..., Findings]
    findings: tuple[tuple[str, Severity], ...] = ()


def seeded(home: Path) -> tuple[Path, Path]:
    """Make the databases that MIOpen leaves, as nobody's, and return that of kernels and that of tuning results."""
    kernels, tuning = store(user_file(home), {(NAME, ARGS): packed(CODE)}, wal=True), home / ".config/miopen" / FIND
    tuning.parent.mkdir(parents=True)
    tuning.write_text("k1=GemmFwdRest:1.5,64,miopenConvolutionFwdAlgoGEMM\n")
    give(home)
    return kernels, tuning


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


def empty_version_folder(home: Path) -> None:
    kernels, _ = seeded(home)
    kernels.unlink()
    give(kernels.parent, to=OTHER)


def kernels_read_only(home: Path) -> None:
    seeded(home)[0].chmod(0o444)


def kernels_of_another(home: Path) -> None:
    give(seeded(home)[0], to=OTHER)


def kernels_unreadable(home: Path) -> None:
    seeded(home)[0].chmod(0)


def companions(home: Path, mode: int) -> None:
    kernels, _ = seeded(home)
    for suffix in ("-wal", "-shm"):
        path = kernels.with_name(kernels.name + suffix)
        path.touch(mode)
        give(path, to=OTHER)


def readers_log(home: Path) -> None:
    companions(home, 0o644)


def unreadable_log(home: Path) -> None:
    companions(home, 0o600)


def hot_journal(home: Path) -> None:
    kernels, _ = seeded(home)
    sql(kernels, "PRAGMA journal_mode=DELETE")
    journal = kernels.with_name(kernels.name + "-journal")
    journal.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(504))
    give(journal, to=OTHER)


def dangling_link(home: Path) -> None:
    kernels, _ = seeded(home)
    kernels.unlink()
    kernels.symlink_to(home / "missing/x.ukdb")


def foreign_table(home: Path) -> None:
    sql(seeded(home)[0], "DROP TABLE kern_db; CREATE TABLE other(a, b)")


def other_columns(home: Path) -> None:
    sql(seeded(home)[0], "DROP TABLE kern_db; CREATE TABLE kern_db(a, b)")


def old_columns(home: Path) -> None:
    sql(seeded(home)[0], f"DROP TABLE kern_db; {TABLE_2_3}")


def own_old_columns(home: Path) -> None:
    old_columns(home)
    kernels = user_file(home)
    kernels.parent.rename(kernels.parent.parent / "2.3.0")


def system_without_table(home: Path) -> Mapping[str, str]:
    seeded(home)
    path = home / "db/gfx90a.kdb"
    path.parent.mkdir()
    sql(path, "CREATE TABLE other(a, b)")
    path.chmod(0o644)
    return {"MIOPEN_SYSTEM_DB_PATH": str(path.parent)}


def no_tuning_folder(home: Path) -> None:
    _, tuning = seeded(home)
    tuning.unlink()
    tuning.parent.rmdir()
    give(tuning.parent.parent, to=OTHER)


def closed_tuning_folder(home: Path) -> None:
    give(seeded(home)[1].parent, to=OTHER)


def tuning_of_another(home: Path) -> None:
    _, tuning = seeded(home)
    give(tuning, to=OTHER)
    tuning.chmod(0o666)


def temporary_of_another(home: Path) -> Mapping[str, str]:
    tuning_of_another(home)
    (home / ".config").rename(home / "tmp/.config")
    return {"HOME": ""}


def leftover_of_another(home: Path) -> None:
    leftover = seeded(home)[1].with_name(f"{FIND}.temp")
    leftover.touch(0o644)
    give(leftover, to=OTHER)


def closed_lock_folder(home: Path) -> None:
    seeded(home)
    folder = home / "tmp/miopen-lockfiles"
    folder.mkdir()
    give(folder, to=OTHER)


def closed_lock_folder_with_the_file(home: Path) -> None:
    seeded(home)
    lock = lock_file(home)
    give(lock.parent, to=OTHER)
    lock.chmod(0o777)


def closed_lock(home: Path) -> None:
    seeded(home)
    give(lock_file(home), to=OTHER)


def file_for_locks(home: Path) -> None:
    seeded(home)
    (home / "tmp/miopen-lockfiles").touch()


def missing_temporary_folder(home: Path) -> Mapping[str, str]:
    seeded(home)
    return {"TMPDIR": str(home / "missing")}


def tuning_text(home: Path, text: str) -> None:
    seeded(home)[1].write_text(text)


def line_without_key(home: Path) -> None:
    tuning_text(home, "garbage\nk1=S:1,2,3\n")


def line_without_value(home: Path) -> None:
    tuning_text(home, "k1=\n")


def line_without_end(home: Path) -> None:
    tuning_text(home, "k1=S:1,2,3")


def fine(home: Path) -> None:
    seeded(home)
    give(lock_file(home).parent)


KERNELS, SYSTEM, TUNING = "miopen", "miopen-system", "miopen-tuning"
USUAL = (
    # A new kernel: "attempt to write a readonly database"; a known one is a hit.
    World(kernels_of_another, KERNELS, doctor, (("closed", RISKS),)),
    # It says "no such column: kernel_name"
    World(other_columns, KERNELS, verify, (("columns", FAILS),)),
    # It says "Error creating file </tmp/miopen-lockfiles/MD5_….lock> for locking."
    World(closed_lock_folder, TUNING, doctor, (("closed", FAILS),)),
    World(fine, TUNING, doctor),
)
OTHERS = (
    # It says "Cannot open database file:…/gfx90a68.ukdb"
    World(empty_version_folder, KERNELS, doctor, (("closed", FAILS),)),
    World(kernels_read_only, KERNELS, doctor, (("closed", RISKS),)),
    World(kernels_unreadable, KERNELS, verify, (("unreadable", FAILS),)),
    World(dangling_link, KERNELS, verify, (("no-file", FAILS),)),
    # The owner's new kernels, after another user has read: "attempt to write a readonly database"
    World(readers_log, KERNELS, doctor, (("closed", RISKS),)),
    # It says "unable to open database file"
    World(unreadable_log, KERNELS, doctor, (("closed", FAILS),)),
    # It says "attempt to write a readonly database", hits too
    World(hot_journal, KERNELS, doctor, (("closed", FAILS),)),
    # MIOpen adds its table.
    World(foreign_table, KERNELS, doctor),
    World(foreign_table, KERNELS, verify, (("foreign", HARMLESS),)),
    # It says "SQLite prepare error: … no such column: kernel_hash"
    World(old_columns, KERNELS, verify, (("columns", FAILS),)),
    # The version that has these columns.
    World(own_old_columns, KERNELS, verify, (("unknown", HARMLESS),)),
    # It says "Invalid fields in table: kern_db disabling access to …", then "no such table: kern_db" at each miss
    World(system_without_table, SYSTEM, verify, (("columns", RISKS),)),
    # It says "filesystem error: cannot create directories: Permission denied […/.config/miopen]"
    World(no_tuning_folder, TUNING, doctor, (("closed", FAILS),)),
    # It says "File is unwritable: …", and the result is not stored
    World(closed_tuning_folder, TUNING, doctor, (("closed", RECOMPILES),)),
    # It says "terminate called without an active exception": a result is appended, then the mode cannot be set.
    World(tuning_of_another, TUNING, doctor, (("closed", RISKS),)),
    World(temporary_of_another, TUNING, doctor, (("closed", RISKS),)),
    # It says "Temp file is unwritable: ….temp"
    World(leftover_of_another, TUNING, doctor, (("closed", RECOMPILES),)),
    # MIOpen opens the lock file that is there.
    World(closed_lock_folder_with_the_file, TUNING, doctor),
    # It says "lock initialization failed. Error code: 3. Native error: 13. Description: 'Permission denied'"
    World(closed_lock, TUNING, doctor, (("closed", FAILS),)),
    # It says "Error creating file <…> for locking."
    World(file_for_locks, TUNING, doctor, (("no-folder", FAILS),)),
    # It says "temp_directory_path: No such file or directory"
    World(missing_temporary_folder, TUNING, doctor, (("no-folder", FAILS),)),
    # It says "Ill-formed record: key not found"; what MIOpen finds again is stored and read.
    World(line_without_key, TUNING, verify, (("malformed", HEALS),)),
    # It says "Error parsing payload under the key", also after MIOpen has stored the result behind it
    World(line_without_value, TUNING, verify, (("malformed", RECOMPILES),)),
    # The next record is joined to it, and stored again by the run after that.
    World(line_without_end, TUNING, verify, (("newline", HEALS),)),
)


@as_root
@pytest.mark.parametrize(
    "world",
    [*USUAL, *thorough(*((world,) for world in OTHERS))],
    ids=lambda world: f"{world.make.__name__}-{world.verb.__name__}",
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
    (home / "lib").mkdir()
    (home / "lib/libMIOpen.so.1").write_bytes(library_bytes("3.3.0.a85ca8a54"))
    variables = {"LD_LIBRARY_PATH": str(home / "lib"), **(world.make(home) or {})}
    os.chown(home, NOBODY, NOBODY)
    stack = Stack(environment_of(home, **variables))
    with acting_as(user):
        return world.verb(stack, [world.layer]).findings
