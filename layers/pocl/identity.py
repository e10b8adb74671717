"""Checks that the files of a program are complete, and belong to its kernels and its machine.

PoCL looks up ``_pocl_kernel_NAME_workgroup`` in native code (``pocl_check_kernel_dlhandle_cache`` in
``lib/CL/devices/common.c``, the same since 3.0), and the kernels in bitcode. Nothing reveals an intact program under
another key, which is a hash, or code of another program's kernel of the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from cachectl.layers.base.environment import Environment
from cachectl.layers.core.finding import FAILS, HEALS, RISKS
from cachectl.layers.core.store import Damage, Doubt
from cachectl.layers.formats import bitcode, elf
from cachectl.layers.host import drivers
from cachectl.layers.pocl import BITCODE, OBJECT
from cachectl.layers.pocl.programs import PARALLEL, functions_in, whole_name

#: The mangled name of a built-in function of OpenCL, which no C library defines.
_BUILT_IN = re.compile(r"_Z\d.*")
_OF_C = ("libc.", "libm.", "ld-")


def judge_files(files: Mapping[str, bytes], environment: Environment) -> Iterator[Damage]:
    """Yield what is or may be wrong with the files of a program: PoCL checks nothing, and fails with most of it.

    The program's own bitcode states the target of native code, because machines of several kinds may share a home.
    """
    program = files.get(BITCODE)
    symbols = bitcode.read_symbols(program or next((files[path] for path in files if path.endswith(PARALLEL)), b""))
    target = "" if symbols is None else symbols.target
    machine = elf.machine_named(target)
    # Other devices than CPUs may have their kernels elsewhere.
    defined = symbols.defined if symbols and program and machine else None
    strange = []
    for path, code in files.items():
        # Other systems have other files.
        if path.endswith(".bc") or (target and machine is None and not code.startswith(elf.MAGIC)):
            continue
        folder, file, is_object = path.partition("/")[0], elf.read_elf(code), path.endswith(OBJECT)
        severity, effect = (HEALS, "; PoCL compiles the kernel again") if is_object else (FAILS, "")
        # The dynamic linker reads no sections, so they may have been cut off.
        kernels = tuple(functions_in(code if file is None else file.defined()))
        is_known = defined is None or folder in defined or whole_name(folder, defined) is not None
        # PoCL replaces what is not an object, but links one for any machine.
        is_loaded = not is_object or file is None or file.kind == elf.OBJECT
        if is_loaded and None not in (machine, own := elf.machine_of(code)) and own != machine:
            number = int.from_bytes(code[18:20], "little")
            yield Damage(FAILS, f"{path}: is {32 * code[4]}-bit code of the ELF machine {number}, not for {target}")
        elif (wrong := code_complaint(code, file, elf.OBJECT if is_object else elf.LIBRARY)) is not None:
            yield Damage(severity, f"{path}: {wrong}{effect}")
        elif whole_name(folder, kernels) is not None:
            strange += [] if is_known else [folder]
            for name in drivers.find_missing(code, () if file is None else file.needed(), environment):
                yield Doubt(RISKS, f"{path}: needs {name}, which is missing here")
        elif is_known:
            yield Damage(severity, f"{path}: has no function of {folder}, but of {' '.join(kernels) or 'none'}{effect}")
        else:
            # A renamed folder is not read, but if both files are another program's, they are.
            yield Doubt(RISKS, f"{path}: neither it nor {BITCODE} has the kernel {folder}")
    wrong = None if program is None else bitcode.complaint(program)
    if wrong is None and strange:
        wrong = f"is of another program: it does not define the kernel {strange[0]}"
    if wrong is not None:
        yield Damage(FAILS, f"{BITCODE}: {wrong}")


def code_complaint(code: bytes, file: elf.Elf | None, kind: int) -> str | None:
    """Return why code cannot be loaded as an ELF file of a type; ``file`` is the code if it could be read."""
    if file is not None and file.kind != kind:
        return f"has the ELF type {file.kind}, not {kind}"
    symbols = file.symbols() if file is not None and kind == elf.LIBRARY else ()
    lacking = [name for name, is_defined in symbols if not is_defined and _BUILT_IN.fullmatch(name)]
    if lacking and file is not None and all(library.startswith(_OF_C) for library in file.needed()):
        return f"needs {lacking[0]}, which nothing defines"
    return elf.linking_complaint(code, file)
