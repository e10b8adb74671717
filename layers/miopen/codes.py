"""The states of MIOpen's databases that no other layer has."""

from cachectl.layers.core.finding import FAILS, HARMLESS, HEALS, RECOMPILES, RISKS, UNSAFE, WASTES, Code

_OF_AMD = "MIOpen needs an AMD GPU, which the tests do not have"

FALLBACK = Code(
    "fallback",
    (UNSAFE,),
    "MIOpen cannot use the home, so it takes kernels from a temporary folder that others own or can write to.",
    "`export MIOPEN_CUSTOM_CACHE_DIR=…`.",
    advice=_OF_AMD,
)
NO_DATABASE = Code(
    "no-database",
    (HEALS,),
    "A libMIOpen finds no system kernels for a GPU.",
    "[The warning and its cure](howto/miopen-warning.md).",
    ("Missing system database file", "Performance may degrade. Please follow instructions to install"),
    advice=_OF_AMD,
)
TUNING = Code(
    "tuning",
    (HARMLESS, RECOMPILES),
    "A variable of a tuning session is still set. `MIOPEN_FIND_ENFORCE=5` erases results in every run.",
    "`unset` it.",
)
QUOTED = Code(
    "quoted",
    (RECOMPILES,),
    "Tuning results are in a folder with quotation marks in its name: some builds of MIOpen 3.2 put them there instead "
    "of into the folder that `MIOPEN_USER_DB_PATH` names.",
    "Move what is in it.",
)
TOO_SMALL = Code(
    "too-small",
    (HEALS,),
    "A system database has less than 512 bytes, perhaps as a git-lfs pointer: MIOpen treats it as missing.",
    "Download it.",
    advice="the package's own server has the file",
)
WAL = Code(
    "wal",
    (FAILS,),
    "A system database is in WAL mode: only users who can write next to it can open it.",
    "As its owner: `sqlite3 FILE 'pragma journal_mode=delete'`.",
    ("unable to open database file",),
    advice="only the owner of a package's file may change it",
)
COLUMNS = Code(
    "columns",
    (FAILS, RISKS),
    "A database has no table `kern_db` with the columns that MIOpen reads, so MIOpen throws: at every lookup if it is "
    "the user's, and at each new kernel if it came with MIOpen.",
    "`mv FILE FILE.aside`, or reinstall the package.",
    ("no such column: kernel", "Invalid fields in table: kern_db disabling access to", "no such table: kern_db"),
)
MALFORMED = Code(
    "malformed",
    (HEALS, RECOMPILES),
    "MIOpen skips this line of a tuning file, and tunes again: in every run if the line has only a key.",
    "Correct or delete it while nothing uses MIOpen.",
    ("Ill-formed record", "Error parsing payload under the key"),
    advice="only you know what the line should say",
)
NEWLINE = Code(
    "newline",
    (HEALS,),
    "A tuning file lacks its last newline, so the next record would join the last.",
    "`echo >> FILE` while nothing uses MIOpen.",
)
_LINE = "Only space is wasted. Delete the line while nothing uses MIOpen, or leave it."
ITEM = Code("item", (HARMLESS,), "A value of a tuning record is skipped.", _LINE, advice=MALFORMED.advice)
DUPLICATE = Code(
    "duplicate", (WASTES,), "A line is never read, because an earlier one has its key.", _LINE, advice=MALFORMED.advice
)
DUPLICATE_ID = Code(
    "duplicate-id", (WASTES,), "An id appears twice; the first is read.", _LINE, advice=MALFORMED.advice
)
HIDDEN = Code("hidden", (HARMLESS,), "An earlier line without a value hides this one.", _LINE, advice=MALFORMED.advice)

OF_KERNELS = (FALLBACK, NO_DATABASE, TOO_SMALL, WAL, COLUMNS)
OF_LINES = (MALFORMED, NEWLINE, ITEM, DUPLICATE, DUPLICATE_ID, HIDDEN)
