"""Builds by PyOpenCL with a tag: a constant in their source and a macro in their options that no other build has.

The name of the constant is stored with the program, so entries of tagged builds can be recognised.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import Any

from cachectl.layers.core.switch import Patch

#: The library that builds.
LIBRARY = "PyOpenCL"
#: Appended to the source. PoCL 7.2 and newer erase unused globals (commit e9113a7b1) before they store the program.
#: OpenCL C 1.0 and 1.1 know neither ``static`` nor ``extern``.
_CONSTANT = "\n\n__constant int {tag} __attribute__((__used__)) = 0;\n"
#: What a tag needs of PyOpenCL's module, and of its programs.
_OF_MODULE = ("link_program", "Kernel", "Error", "program_info", "program_kind", "kernel_info")
_BUILDS = ("build", "compile")
_OF_PROGRAM = (*_BUILDS, "from_int_ptr", "int_ptr", "get_info")


def _pyopencl() -> Any:
    return sys.modules["pyopencl"]


def can_tag() -> bool:
    """Return whether PyOpenCL is loaded, without which there is nothing to tag."""
    return hasattr(sys.modules.get("pyopencl"), "Program")


def misfit() -> str | None:
    """Return what the loaded PyOpenCL lacks for a tag; ``None`` if it lacks nothing."""
    from inspect import unwrap

    pyopencl = _pyopencl()
    for owner, names in ((pyopencl, _OF_MODULE), (pyopencl.Program, _OF_PROGRAM)):
        for name in names:
            if not hasattr(owner, name):
                return f"{LIBRARY} has no {name if owner is pyopencl else f'Program.{name}'}"
    made = getattr(unwrap(pyopencl.Program.__init__), "__code__", None)
    lacking = [name for name in ("_prg", "_context", "_source") if name not in getattr(made, "co_names", ())]
    return f"its programs have no {lacking[0]}" if lacking else None


def patches(tagger: Any) -> tuple[Patch, ...]:
    """Return the replacements for every function by which PyOpenCL builds programs from source.

    ``tagger.salts(platform)`` decides whether builds for a platform get a tag. A build runs in the context
    ``tagger.build()``, whose value has the ``tag``, and gets a reference to the built program as its ``program``.
    """
    return (
        *(("pyopencl", "Program", name, partial(_once, _tagged_build, tagger)) for name in _BUILDS),
        ("pyopencl", None, "link_program", partial(_once, _tagged_link, tagger)),
    )


def _once(tagged: Callable[..., Any], tagger: Any, function: Callable[..., object]) -> Callable[..., object]:
    """Return a replacement for a function, unless that is one already."""
    if getattr(function, "tags", False):
        return function
    replacement: Callable[..., object] = wraps(function)(tagged(tagger, function))
    vars(replacement)["tags"] = True
    return replacement


def _tagged_build(tagger: Any, build: Callable[..., object]) -> Callable[..., object]:
    def build_tagged(program: Any, *arguments: Any, **named: Any) -> object:
        source = None
        try:
            if tagger.salts(_platform_of(_context_of(program))):
                source = _source_of(program)
        except Exception as error:  # noqa: BLE001 - from an unexpected PyOpenCL; the program's build continues
            warnings.warn(f"a build of {LIBRARY} gets no salt: {error!r}", RuntimeWarning, stacklevel=2)
        if source is None:
            return build(program, *arguments, **named)
        made = program._prg  # noqa: SLF001 - to which the driver counts references
        with tagger.build() as built:
            if "options" in named:
                named["options"] = _with_macro(named["options"], built.tag)
            else:
                arguments = (_with_macro(next(iter(arguments), None), built.tag), *arguments[1:])
            try:
                with _source_replaced(program, source, built.tag):
                    return build(program, *arguments, **named)
            finally:
                if program._prg is not made:  # noqa: SLF001
                    built.program = _held(program)

    return build_tagged


def _tagged_link(tagger: Any, link: Callable[..., object]) -> Callable[..., object]:
    def link_tagged(context: Any, programs: Iterable[Any], *rest: object, **named: object) -> object:
        if not tagger.salts(_platform_of(context)):
            return link(context, programs, *rest, **named)
        # The replacement compiles it, with a constant.
        tagged = _pyopencl().Program(context, "\n").compile()
        with tagger.build() as built:
            linked: Any = link(context, [*programs, tagged], *rest, **named)
            built.program = _held(linked)
            return linked

    return link_tagged


def _held(program: Any) -> Any:
    """Return a second reference to what a program built, if anything."""
    made = program._prg  # noqa: SLF001
    return None if made is None else _pyopencl().Program.from_int_ptr(made.int_ptr)


def ask_for_binaries(program: Any) -> None:
    """Make the driver create the binaries of a program, unless it has."""
    with suppress(_pyopencl().Error):
        program.get_info(_pyopencl().program_info.BINARIES)


def count_references(program: Any) -> int:
    """Return the driver's count of references to a program; 0 for ``None``."""
    return 0 if program is None else int(program.get_info(_pyopencl().program_info.REFERENCE_COUNT))


def holders() -> tuple[Counter[int], dict[int, list[int]] | None]:
    """Return how this process holds programs, by their addresses.

    First the number of objects that hold a reference to each; then the reference counts of its kernels, 1 if only
    Python holds one, or ``None`` if another thread is creating a kernel, which cannot be queried yet.
    """
    pyopencl = _pyopencl()
    gc.collect()
    everything = gc.get_objects()
    programs = [item for item in everything if issubclass(type(item), pyopencl.Program)]
    kernels = [item for item in everything if issubclass(type(item), pyopencl.Kernel)]
    del everything
    # A copy of such an object holds no reference of its own.
    distinct = {id(made): made for made in (vars(program).get("_prg") for program in programs) if made is not None}
    held_by = Counter(int(made.int_ptr) for made in distinct.values())
    counts: dict[int, list[int]] = {}
    for kernel in kernels:
        try:
            program = kernel.get_info(pyopencl.kernel_info.PROGRAM)
            count = int(kernel.get_info(pyopencl.kernel_info.REFERENCE_COUNT))
        except TypeError:
            return held_by, None
        counts.setdefault(program.int_ptr, []).append(count)
        # It holds the program too.
        del program
    return held_by, counts


def rests(program: Any, held_by: Mapping[int, int], kernels: Mapping[int, list[int]] | None, *, alone: bool) -> bool:
    """Return whether nothing but the :func:`holders` holds a program or its kernels."""
    if kernels is None:
        return False
    mine = kernels.get(program.int_ptr, [])
    references = held_by.get(program.int_ptr, 0) + len(mine)
    return count_references(program) == references and all(count == 1 for count in mine) and (alone or not mine)


def _source_of(program: Any) -> str | bytes | None:
    """Return the source of a program; ``None`` if it is built from a binary or IL."""
    made = program._prg  # noqa: SLF001 - where PyOpenCL keeps it
    if made is None:
        source: str | bytes = program._source  # noqa: SLF001
        return source
    if made.kind() != _pyopencl().program_kind.SOURCE:
        return None
    return str(made.get_info(_pyopencl().program_info.SOURCE)).rstrip("\0") or None


def _context_of(program: Any) -> Any:
    made = program._prg  # noqa: SLF001
    return program._context if made is None else made.get_info(_pyopencl().program_info.CONTEXT)  # noqa: SLF001


def _platform_of(context: Any) -> str:
    return str(context.devices[0].platform.name)


@contextmanager
def _source_replaced(program: Any, source: str | bytes, tag: str) -> Iterator[None]:
    """Make a program be built again from its source with a constant; restore it if that fails."""
    made = program._prg  # noqa: SLF001
    had = vars(program).get("_source")
    if made is not None:
        program._context = vars(program).get("_context") or _context_of(program)  # noqa: SLF001
        program._prg = None  # noqa: SLF001
    line = _CONSTANT.format(tag=tag)
    program._source = source + (line.encode() if isinstance(source, bytes) else line)  # type: ignore[operator]  # noqa: SLF001
    try:
        yield
    except BaseException:
        if made is not None:
            program._prg = made  # noqa: SLF001
        raise
    finally:
        if had is None:
            del program._source  # noqa: SLF001
        else:
            program._source = had  # noqa: SLF001


def _with_macro(options: Any, tag: str) -> Any:
    macro = f"-D{tag.upper()}=1"
    return f"{options} {macro}" if isinstance(options, str) else [*(options or ()), macro]
