"""How PoCL's orphans are recognised: leaked temporaries, programs built with the cache off, and empty folders.

Files and folders with other names are left alone. Sources: ``lib/CL/pocl_cache.c``, ``lib/CL/pocl_file_util.c``.
"""

from __future__ import annotations

import re
from typing import Final

from cachectl.layers.base.facts import Root
from cachectl.layers.base.lazy import regex
from cachectl.layers.formats.pocl_programs import BITCODE, DRAWN, MEMBERS
from cachectl.layers.stores.tree import OrphanRule, Shape

#: Drawn characters that are no word, for folders that may contain files of others: one draw in ninety is a word, and a
#: word is more likely somebody's own name.
_NO_WORD: Final = f"(?=.*[0-9]|.+[A-Z]){DRAWN}"
#: Begins the name of a program's folder that is built with the cache off.
UNCACHED: Final = "_UNCACHED_"
_SUFFIX: Final = r"\.(?:cl|preproc\.cl|so|so\.o|spirv|spv|bc|s|binary|map)"


def _leaked(drawn: str) -> tuple[OrphanRule, OrphanRule]:
    """Return the rules for leaked temporaries with these random characters in their names."""
    leaked, uncached = regex(f"tempfile_{drawn}"), regex(f"{UNCACHED}{drawn}")
    return (
        OrphanRule(leaked, "leaked by a PoCL process", idle_only=False, empty=True, private=True),
        OrphanRule(uncached, "a program built with the cache off", private=True, members=MEMBERS),
    )


def _compiling(drawn: str) -> OrphanRule:
    """Return the rule for a compile's temporaries, which is safe only in a folder with PoCL's name."""
    return OrphanRule(regex(f"tempfile_{drawn}{_SUFFIX}"), "a compile's temporary file", private=True)


#: Headers handed to a compile may have any name, so they are recognised only in a folder that belongs to PoCL alone.
_HEADERS: Final = OrphanRule(
    regex(f"tempdir_{DRAWN}"), "a compile's temporary folder", private=True, members=regex(".*", re.DOTALL)
)
LEVELS: Final = (regex("[A-P]{2}"), regex("[A-P]{37}"))
#: A purge beside a running PoCL leaves these: PoCL makes one if it is missing, then a program's folder in it, and the
#: build fails if it vanishes between the two (``pocl_mkdir_p`` in ``lib/CL/pocl_file_util.c``).
_EMPTY: Final = OrphanRule(LEVELS[0], "an empty folder of programs", members=regex("(?!)"))
#: Shapes of three kinds of root: any folder, one whose name contains ``pocl``, and one that PoCL alone uses.
NAMED: Final = Shape(LEVELS, folders=True, members=MEMBERS, orphans=_leaked(_NO_WORD), first=(BITCODE, "program.spv"))
_BEARING: Final = NAMED._replace(
    orphans=(*_leaked(_NO_WORD), _compiling(_NO_WORD)), empty=_EMPTY._replace(private=True)
)
_OWN: Final = NAMED._replace(orphans=(*_leaked(DRAWN), _compiling(DRAWN), _HEADERS), empty=_EMPTY)


def shape_of(root: Root) -> Shape:
    """Return the shape of a root: the less certain it is that PoCL alone uses it, the fewer temporaries it has."""
    if root.path.name == root.role:
        return _OWN
    return _BEARING if "pocl" in root.path.name.lower() else NAMED
