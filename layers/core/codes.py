"""The codes that any layer can report; a layer declares its own in its :class:`About`."""

from __future__ import annotations

from cachectl.layers.core.finding import FAILS, HARMLESS, HEALS, RECOMPILES, RISKS, UNSAFE, WASTES, Code

_NOT_NEEDED = "nothing needs to be done"

# ---------------------------------------------------------------------- places

NO_FOLDER = Code(
    "no-folder",
    (FAILS, RECOMPILES),
    "A file or a dangling link is in the place of a root, or of a folder above it.",
    "`mkdir -p` the link's target, move the file, or `unset` the variable.",
    ("Not a directory", "File exists"),
)
CLOSED = Code(
    "closed",
    (FAILS, RISKS, RECOMPILES),
    "You cannot create a root, write to it, or write to files in it that the library opens for writing. "
    "After `sudo`, root often owns it. Its file system may also be mounted read-only.",
    "`sudo chown` or `chmod u+w` it, or move the layer.",
    (
        "attempt to write a readonly database",
        "unable to open database file",
        "no devices found",
        "Context failed: INVALID_VALUE",
        "Permission denied",
        "Read-only file system",
    ),
)
NOEXEC = Code(
    "noexec",
    (FAILS,),
    "A root is on a file system that is mounted with `noexec`, such as one of `docker run --tmpfs`, so no library can "
    "map code from it.",
    "Move the layer, or mount the file system with `exec`.",
    ("failed to map segment from shared object",),
)
OWNER = Code(
    "owner",
    (UNSAFE,),
    "A root, or a folder above it, belongs to another user, who can put code there that runs as you. `sudo -E` keeps "
    "your own `HOME`: use `sudo -H`.",
    "Use a root of your own.",
)
WRITABLE = Code("writable", (UNSAFE,), "Others can write to a root, or to a folder above it.", "`chmod go-w`.")
NETWORK = Code(
    "network",
    (RISKS, HARMLESS),
    "A root is on a network file system; the message says what is unsafe.",
    "Move the layer to a local disk, or [start warm](howto/start-warm.md).",
    ("locking protocol", "database is locked", "disk I/O error", "Stale file handle"),
    advice="the tests have no network file system",
)
RANKS = Code(
    "ranks",
    (RISKS, HARMLESS),
    "Ranks of this job share a root.",
    "Give each rank its own in the script that it runs, or use `cachectl stage`. If the home is on a network file "
    "system, the fix names a private folder on the node, which starts empty.",
)
VOLATILE = Code(
    "volatile",
    (HEALS,),
    "A root is in the container's own layer, or the home is in memory, and is lost with it: each new container "
    "recompiles what its image does not contain.",
    "[Keep it in a volume, or in the image](howto/containers.md).",
    advice="only the user who starts the container can add a volume",
)
FULL = Code(
    "full",
    (FAILS, RISKS),
    "A file system, your quota or your group's has less than 16 MiB or 100 files left (*may fail a run*), or less than "
    "1 MiB or 10 files (*fails every run*).",
    "[My disk is full](howto/disk-full.md).",
    ("No space left on device", "Disk quota exceeded", "database or disk is full"),
)

# ---------------------------------------------------------------------- variables and software

OFF = Code(
    "off", (RECOMPILES,), "A variable switches a cache off.", "`unset` it, if you did not mean to switch the cache off."
)
VARIABLE = Code(
    "variable",
    (HARMLESS, WASTES, RECOMPILES, RISKS, FAILS),
    "A variable has a value that its library does not understand, or probably not as intended, such as `~` or `$HOME` "
    "that no shell has expanded (`ENV` of a Dockerfile); the message names the place that is used. Or no release reads "
    "a variable of that name, which resembles another.",
    "`unset` it, or `export` what the fix names.",
)
PLUGIN = Code(
    "plugin",
    (HARMLESS, FAILS),
    "A layer of another distribution failed.",
    "Fix or uninstall it; the other layers work.",
    advice="only its author can fix a plug-in",
)

# ---------------------------------------------------------------------- contents of a root

STALE = Code(
    "stale",
    (WASTES,),
    "Entries of a driver that was [seen here and is gone](cli/common.md#stale).",
    "`cachectl prune --stale LAYER`.",
)
LEAKED = Code(
    "leaked",
    (WASTES, HARMLESS),
    "Temporary files and failed builds that nothing reads.",
    "`cachectl prune --stale LAYER` removes them too.",
)
UNREADABLE = Code(
    "unreadable",
    (FAILS, RISKS, RECOMPILES, HARMLESS),
    "A root, a folder or a file could not be read; everything else was. If a program is writing, try again later.",
    "`chmod u+rwX`, or `sudo chown -R` for what another user owns in your home.",
    ("Permission denied",),
)
CAP = Code(
    "cap",
    (RECOMPILES,),
    "A cache is nine tenths full, and its library drops entries to make room.",
    "Raise the limit (`CUDA_CACHE_MAXSIZE`, 1 GiB by default), or prune.",
)
LOCK = Code(
    "lock",
    (FAILS, RISKS, HARMLESS),
    "A lock outlived its holder, or its holder hangs: [programs wait for it, then fail](cli/doctor.md#how-it-judges).",
    "`cachectl prune --stale LAYER` if it is abandoned; else wait for the process that the fix names, or end it.",
    ("waited more than one minute on the lock file", "Db lock has failed to lock"),
)
PENDING = Code(
    "pending",
    (HARMLESS,),
    "A program ended while it was writing to a database. Until that write is finished, the rows are not listed.",
    "The next program that opens the database finishes it; so does `sqlite3 FILE .tables`.",
    advice=_NOT_NEEDED,
)
DAMAGED = Code(
    "damaged",
    (FAILS, RISKS, RECOMPILES, HEALS, WASTES, HARMLESS),
    "The library could not use the entry, or the database. A whole database is removed only if no program has it open. "
    "Damaged tuning results are never removed: correct or delete the named line.",
    "`cachectl purge --damaged LAYER`.",
    (
        "database disk image is malformed",
        "file is not a database",
        "invalid ELF header",
        "file too short",
        "Invalid bitcode",
        "pickle data was truncated",
        "Bus error",
    ),
)
DOUBTFUL = Code(
    "doubtful",
    (RISKS,),
    "An entry needs a library that is not found here, or its files are from several builds.",
    "`cachectl purge LAYER --key KEY` if programs fail.",
    ("cannot open shared object file",),
)
INDEX = Code(
    "index",
    (WASTES, HEALS),
    "The index of a cache does not agree with its entries.",
    "The next purge, such as `purge --damaged cuda`, or `put` updates it; or `rm` the file.",
    advice="the next change of the cache writes it again",
)
NO_FILE = Code(
    "no-file",
    (HARMLESS, RECOMPILES, FAILS),
    "Something other than a file has the name of a database.",
    "Move it elsewhere.",
    ("unable to open database file",),
)
UNKNOWN = Code(
    "unknown",
    (HARMLESS, RISKS),
    "Something in an entry's place is in a format that this `cachectl` does not know, such as that of a newer release; "
    "or a row needs a module that no known Python of its version has. It is left unchanged, and `verify` exits with 1.",
    "Use a newer `cachectl`, or `purge` the named key.",
    ("No module named",),
    advice=_NOT_NEEDED,
)
FOREIGN = Code("foreign", (HARMLESS,), "A database of another program.", "It is left alone.", advice=_NOT_NEEDED)
LINK = Code("link", (HARMLESS,), "A link, which is not followed.", "It is left alone.", advice=_NOT_NEEDED)
UNRECOGNISED = Code(
    "unrecognised", (HARMLESS,), "Something that the layer does not recognise.", "It is left alone.", advice=_NOT_NEEDED
)
HALF = Code(
    "half", (HARMLESS,), "A file of an entry is missing or empty.", "The library rebuilds it.", advice=_NOT_NEEDED
)

OF_PLACES = (NO_FOLDER, CLOSED, NOEXEC, OWNER, WRITABLE, NETWORK, RANKS, VOLATILE, FULL)
OF_SETUP = (OFF, VARIABLE, PLUGIN)
OF_CONTENTS = (
    *(STALE, LEAKED, CAP, LOCK, UNREADABLE, PENDING, DAMAGED, DOUBTFUL),
    *(INDEX, NO_FILE, UNKNOWN, FOREIGN, LINK, UNRECOGNISED, HALF),
)
#: The codes of all layers, by name.
COMMON = {code.name: code for code in (*OF_PLACES, *OF_SETUP, *OF_CONTENTS)}
