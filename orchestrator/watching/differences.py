"""What kernels were built from, and how two builds of one differ."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from cachectl.layers.base.lazy import regex
from cachectl.layers.base.text import plural
from cachectl.layers.disk import distributions, plain
from cachectl.layers.formats.opencl_source import kernel_names
from cachectl.watching import causes, ledger
from cachectl.watching.program_events import PORTABLE, BuildInputs, ProcessStart, ProcessState

_INCLUDE = regex(r'(?m)^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]')
_MACRO = regex(r"[ \t]*#[ \t]*define[ \t]+(\w+)(?:\([^)]*\))?[ \t]*(.*)")
_WORD = regex(r"([A-Za-z_]\w*)")
_CALL = regex(r"\b([A-Za-z_]\w*)\s*\(")
_TYPE = regex(
    r"u?(?:char|short|int|long)\d*|(?:float|double|half)\d*|bool|void|size_t|_*(?:global|local|constant|private)"
)
_VERSION = regex(r"(?:OpenCL [\d.]+ )?(.*?)(?:  .*|,.*?)?( \([^()]*\))?")
#: Headers that are read of one build, and bytes of one header.
_MOST_HEADERS, _LARGEST_HEADER = 64, 4 << 20
#: Characters of the longest source of which a difference is shown; to find it takes their square.
_LONGEST_DIFF = 1 << 18
_LEFT_OUT = "none (as with --portable)"
#: Differences that are named of one kernel, and characters of each.
NAMED, _LONG = 2, 80


def read_build(
    build: BuildInputs,
    text: str,
    process: ProcessStart,
    state: ProcessState,
    names: Collection[str],
) -> ledger.Build:
    """Return what a build was made from as the ledger keeps it, with the text of its source, "" if that is unknown.

    ``process`` is the event by which its process started, and ``state`` the one that noted its variables and working
    directory last; ``names`` are variables that are part of keys.
    """
    variables = state.variables
    # PyOpenCL adds its own folder to the options of every build that is not portable.
    paths = () if PORTABLE in variables else process.paths
    return ledger.Build(
        build.source,
        ledger.pack(text),
        build.options,
        build.devices,
        build.platform,
        build.version,
        distributions.pyopencl_includes([Path(path) for path in paths]) or "",
        tuple(_headers(text, build.options.split(), state.cwd)),
        tuple((name, variables[name]) for name in sorted(names) if name in variables),
        program_of(process),
    )


def program_of(process: ProcessStart) -> str:
    """Return what identifies a program in later runs: the path of its script, or its module, or its command."""
    words, folder = process.program, process.cwd
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == "-m":
            return f"python -m {after}"
        if word.startswith("-c"):
            return "python -c"
        if word.endswith(".py"):
            return os.path.normpath(os.path.join(folder, word))
    return os.path.normpath(os.path.join(folder, words[0])) if words else ""


def _headers(text: str, options: Sequence[str], folder: str) -> Iterator[tuple[str, str]]:
    """Yield the files that a source includes, and those that they include, with digests, as far as they can be read."""
    joined = [option[2:] for option in options if option.startswith("-I") and len(option) > len("-I")]
    apart = [after for option, after in pairwise(options) if option == "-I"]
    folders = [os.path.join(folder, named) for named in (*joined, *apart, "")]
    waiting, read_paths = [text], set[str]()
    while waiting and len(read_paths) < _MOST_HEADERS:
        for name in _INCLUDE.findall(waiting.pop()):
            paths = (os.path.normpath(f"{above}/{name}") for above in folders)
            path = next(filter(os.path.isfile, paths), None)
            if path is not None and path not in read_paths:
                read_paths.add(path)
                with suppress(OSError):
                    data = plain.read_plain(path, most=_LARGEST_HEADER, follow=True)
                    waiting.append(data.decode(errors="replace"))
                    yield path, digest(data)


def digest(data: bytes) -> str:
    """Return a short digest of something that is compared."""
    return hashlib.sha256(data).hexdigest()[:16]


def nearest(
    builds: Iterable[ledger.Build], earlier: Sequence[ledger.Build]
) -> tuple[ledger.Build, ledger.Build] | None:
    """Return the build of a run, and the one of the last runs, that differ in least, among those that are new."""
    new = [build for build in builds if build not in earlier] or builds

    def distance(pair: tuple[ledger.Build, ledger.Build]) -> int:
        return sum(one != other for one, other in zip(*pair, strict=True))

    # Of those that differ alike the newest.
    pairs = [(now, before) for now in new for before in reversed(earlier)]
    return min(pairs, key=distance, default=None)


def find_differences(now: ledger.Build, before: ledger.Build) -> Iterator[str]:
    """Yield what differs between two builds, apart from the driver's version."""
    if now.platform != before.platform:
        yield causes.CHANGED.say(name="the platform", now=now.platform, before=before.platform)
    elif now.version == before.version and now.devices != before.devices:
        yield causes.DEVICE.say(now=", ".join(now.devices), before=", ".join(before.devices))
    here, there = dict(now.variables), dict(before.variables)
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            yield causes.CHANGED.say(name=name, now=here.get(name, "unset"), before=there.get(name, "unset"))
    if now.includes != before.includes:
        yield causes.INCLUDES.say(now=now.includes or _LEFT_OUT, before=before.includes or _LEFT_OUT)
    if now.options != before.options:
        yield _changed_options(now.options.split(), before.options.split())
    if now.source != before.source:
        yield _changed_source(now.text, before.text)
    # A copy of a header elsewhere is the same.
    contents = [Counter((os.path.basename(path), content) for path, content in one.headers) for one in (now, before)]
    changed = [path for path, content in now.headers if (os.path.basename(path), content) not in contents[1]]
    if now.source == before.source and contents[0] != contents[1]:
        yield causes.HEADER.say(names=", ".join(changed[:NAMED] or sorted(path for path, _ in before.headers)[:NAMED]))


def _changed_options(now: list[str], before: list[str]) -> str:
    added = [word for word in now if word not in before]
    removed = [word for word in before if word not in now]
    if len(added) == len(removed) == 1:
        return causes.OPTION.say(now=added[0], before=removed[0])
    if added and not removed:
        return causes.OPTION_NEW.say(now=_cut(" ".join(added)))
    if removed and not added:
        return causes.OPTION_GONE.say(before=_cut(" ".join(removed)))
    return causes.OPTIONS.say(now=_cut(" ".join(added or now)), before=_cut(" ".join(removed or before)))


def _changed_source(now: str | None, before: str | None) -> str:
    if now is None or before is None:
        return causes.SOURCE.say(where="")
    here, there = Counter(now.splitlines()), Counter(before.splitlines())
    added, removed = [*(here - there).elements()], [*(there - here).elements()]
    if not added and not removed:
        return causes.ORDER.say() if now != before else causes.SOURCE.say(where="")
    macros = [{match[1]: match[2] for line in lines if (match := _MACRO.fullmatch(line))} for lines in (added, removed)]
    if len(macros[0]) == len(added) and len(macros[1]) == len(removed):
        named = [
            causes.MACRO.say(name=name, now=macros[0].get(name, "undefined"), before=macros[1].get(name, "undefined"))
            for name in {**macros[0], **macros[1]}
        ]
        return _cut(" and ".join(named[:NAMED]))
    if names := renamed(now, before):
        return causes.NAMES.say(now=names[0], before=names[1])
    return causes.SOURCE.say(where=f" (in {plural(max(len(added), len(removed)), 'line')})")


def renamed(now: str, before: str) -> tuple[str, str] | None:
    """Return the first name, and what it was, if two sources differ only in names, each always by the same other.

    A function that is called, and a type, are no mere names.
    """
    here, there = _WORD.split(now), _WORD.split(before)
    pairs = dict(zip(here[1::2], there[1::2], strict=False))
    same = len(here) == len(there) and here[::2] == there[::2] and len({*pairs.values()}) == len(pairs)
    if not same or [pairs[word] for word in here[1::2]] != there[1::2]:
        return None
    changed = [(word, was) for word, was in pairs.items() if word != was]
    kernels = kernel_names(f"{now}\n{before}".encode(errors="replace"))
    words = {word for pair in changed for word in pair}.difference(kernels or ())
    called = {match[1] for text in (now, before) for match in _CALL.finditer(text)}
    return changed[0] if changed and not words & called and not any(map(_TYPE.fullmatch, words)) else None


def diff(kernel: str, builds: Iterable[ledger.Build], earlier: Sequence[ledger.Build]) -> str | None:
    """Return how the source of a kernel differs from the nearest earlier one, as a unified diff, if both are known."""
    here, there = (build.text for build in nearest(builds, earlier) or (ledger.Build(), ledger.Build()))
    if here is None or there is None or here == there or max(len(here), len(there)) > _LONGEST_DIFF:
        return None
    lines = difflib.unified_diff(
        there.splitlines(), here.splitlines(), f"{kernel} (before)", f"{kernel} (this run)", lineterm=""
    )
    return "\n".join(lines)


def _cut(text: str) -> str:
    return text if len(text) <= _LONG else text[: _LONG - 1] + "…"


def short_version(version: str) -> str:
    """Return the part of a platform's version that tells drivers apart to a reader."""
    match = _VERSION.fullmatch(version)
    return version if match is None else f"{match[1]}{match[2] or ''}"
