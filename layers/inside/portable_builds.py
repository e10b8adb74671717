"""Removes PyOpenCL's include folder from the options of builds that do not need it, inside the program.

PyOpenCL adds ``-I …/site-packages/pyopencl/cl`` to every build (``_DEFAULT_INCLUDE_OPTIONS`` in ``__init__.py``), and
every driver hashes options, so a program hits only if PyOpenCL is at the same path. A program without an ``include``
does not need the folder, nor does ``#include <NAME>`` of a name that it does not have. A literal
``#include <pyopencl-….h>`` outside any ``#if`` is replaced by the text of the header. Every other build is unchanged,
and noted with the include.

A run copies this file next to its observer: it imports only the standard library, and runs on Python 3.8.
"""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from cachectl.layers.inside.observer import Invocation, Notes

#: Comments, strings and characters. An unclosed quote ends with its line, as in clang's lexer.
_QUIET = re.compile(
    r'//(?:\\[ \t]*\r?\n|[^\r\n])*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"?|' + r"'(?:\\.|[^'\\\n])*'?", re.DOTALL
)
_SPLICE = re.compile(r"\\[ \t]*\r?\n")
#: Trigraphs, raw strings of C++ for OpenCL, comment marks across two lines, and line ends of old Macs.
_STRANGE = re.compile(r'\?\?[=/]|R"|[/*]\\[ \t]*\r?\n[/*]|\r(?!\n)')
_INCLUDES = re.compile(r"\binclude(?:_next)?\b|__has_include|(?:#|%:)\s*import\b")
_DIRECTIVE = re.compile(r"[ \t]*(?:#|%:)[ \t]*(\w+)")
#: An include that names a file, with nothing after it on the line.
_LITERAL = re.compile(r'[ \t]*#[ \t]*include[ \t]*(?:<([\w./-]+)>|"([\w./-]+)")[ \t]*\r?')
_ONCE = re.compile(r"(?m)^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*\r?$")
#: Options that include a file, or name further folders.
_IN_OPTIONS = re.compile(rb"(?:^|\s)-i\w*|include")
_FOLDER = re.compile(rb"[-/]I ?(?:\"[^\"]*\"|\S+)")
_KERNEL = re.compile(r"\b(?:__)?kernel\b.*?\bvoid\s+(\w+)", re.DOTALL)
#: The mark of a program whose source was given to the driver with headers in it.
_GIVEN = "_cachectl_has_headers"


class Needed(Exception):
    """A build needs the folder; the text is the include."""


def watch(module: ModuleType, notes: Notes) -> None:
    """Replace the builds of ``pyopencl``. Raises :class:`AttributeError` if it does not add the folder as expected."""
    getattr(module, "_DEFAULT_INCLUDE_OPTIONS")  # noqa: B009
    process = module.Program._process_build_options  # noqa: SLF001

    def before(call: Invocation) -> tuple[dict[str, object], str | bytes, list[str], str] | None:
        mine, added = vars(call.arguments[0]), module._DEFAULT_INCLUDE_OPTIONS  # noqa: SLF001 - programs may change it
        # A program of binaries or IL has no source.
        if not notes.folder or len(added) != 2 or added[0] != "-I" or not mine.keys() >= {"_source", "_context"}:  # noqa: PLR2004
            return None
        source, own = mine["_source"], " ".join(added).encode()
        encoding = "latin-1" if isinstance(source, bytes) else "utf-8"
        text = source.decode(encoding) if isinstance(source, bytes) else source
        options, folders = process(mine["_context"], call.get(1, "options"))
        try:
            if named := _IN_OPTIONS.search(_FOLDER.sub(b"", options)):
                raise Needed(f"an option with {named[0].strip().decode()}")
            full = Headers(added[1].strip('"'), folders, encoding).put_into(text)
            if full != text:
                if mine.get("_prg") is not None and _GIVEN not in mine:
                    raise Needed("a header, and the driver has had its source since before it was built")
                mine[_GIVEN] = True
                mine["_source"] = full.encode(encoding) if isinstance(source, bytes) else full
        except Needed as need:
            return mine, source, _KERNEL.findall(text), str(need)

        def process_without(*arguments: object, **named: object) -> tuple[bytes, list[str]]:
            options, folders = process(*arguments, **named)
            # It comes after the program's own options.
            first, separator, last = (b" %b " % options).rpartition(b" %b " % own)
            kept = [path for path in folders if path != added[1].strip('"')]
            return ((first + b" " + last).strip() if separator else options), kept

        mine["_process_build_options"] = process_without
        return mine, source, [], ""

    def after(call: Invocation) -> None:
        if call.before is not None:
            mine, mine["_source"], kernels, kept = call.before
            mine.pop("_process_build_options", None)
            notes.add(call.start, event="portable", kernels=kernels, kept=kept)

    notes.wrap(module.Program, "build", after, before)


@functools.lru_cache(maxsize=64)
def _quieted(text: str) -> str:
    """Return a text without comments and strings, with the same lines. Raises :class:`Needed` for unusual includes."""
    if _STRANGE.search(text):
        raise Needed("unusual characters")
    quiet = _QUIET.sub(lambda match: " " + "\n" * match[0].count("\n"), text)
    if len(_INCLUDES.findall(_SPLICE.sub("", quiet))) != len(_INCLUDES.findall(quiet)):
        raise Needed("an include in several lines")
    return quiet


class Headers:
    """PyOpenCL's folder of headers, and the other folders of the search path."""

    def __init__(self, folder: str, folders: Sequence[str], encoding: str = "utf-8") -> None:
        self._folder = folder
        # PyOpenCL puts the working folder before those of options.
        self._before = [path for path in folders[1:] if path != folder]
        self._encoding = encoding
        #: The headers to be included once that were.
        self._once: set[str] = set()

    def put_into(self, text: str) -> str:
        """Return a source with headers in place of their includes. Raises :class:`Needed` if that is not certain."""
        plain = _SPLICE.sub("", text) if "\\" in text else text
        # Searching for a word takes much less time than matching a pattern.
        is_plain = not any(word in plain for word in ("include", "import", "??/"))
        return text if is_plain else self._inlined(text, None)

    def _inlined(self, text: str, above: str | None) -> str:
        """Return a text with headers in it; ``above`` is the folder of a header, ``None`` for the program."""
        quiet = _quieted(text)
        lines, result, depth = text.split("\n"), [], 0
        for number, (line, code) in enumerate(zip(lines, quiet.split("\n"))):  # noqa: B905 - not in Python 3.8
            if "#" in code or "%:" in code:
                directive = _DIRECTIVE.match(code)
                word = directive[1] if directive else ""
                depth += (word in ("if", "ifdef", "ifndef")) - (word == "endif")
            if not ("clude" in code or "import" in code) or not _INCLUDES.search(code):
                result.append(line)
                continue
            match, is_own = _LITERAL.fullmatch(line), above is not None
            # A quoted name is a string, which the code lacks, and may be that of a file next to the source.
            if match is None or (not is_own and code != line) or (number and lines[number - 1].rstrip().endswith("\\")):
                raise Needed(line.strip())
            path = self.find(match, above or "")
            if path is not None and depth and not is_own:
                raise Needed(line.strip())
            # Without the folder, the result for a header that is not in it is the same.
            result.append(line if path is None else self.marked(path, number + 2, depth))
        return "\n".join(result)

    def find(self, match: re.Match[str], above: str) -> str | None:
        """Return the path of an included file below the folder; ``None`` if it does not exist."""
        name = match[1] or match[2]
        if any(os.path.exists(os.path.join(folder, name)) for folder in self._before):
            raise Needed(f"{name}, which a folder of the options has")
        choices = (name,) if match[1] else (os.path.normpath(os.path.join(above, name)), name)
        return next((path for path in choices if os.path.isfile(os.path.join(self._folder, path))), None)

    def marked(self, path: str, line: int, depth: int) -> str:
        """Return the text of a header between the marks by which a preprocessor shows what it included.

        So errors and ``__FILE__`` after it, from ``line`` on, do not change; ``#line`` would need the driver's name for
        the program's own source. NVIDIA's messages ignore the marks.
        """
        if path in self._once:
            return ""
        with open(os.path.join(self._folder, path), encoding=self._encoding, newline="") as file:
            text = file.read()
        if "pragma" in text and _ONCE.search(text):
            if depth:
                raise Needed(f"{path}, in an #if")
            self._once.add(path)
            text = _ONCE.sub("", text)
        return f'# 1 "{path}" 1\n{self._inlined(text, os.path.dirname(path))}\n# {line} "" 2'
