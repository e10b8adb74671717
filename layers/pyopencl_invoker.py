"""The layer ``pyopencl-invoker``: the dictionaries of PyOpenCL's generated Python wrappers.

Sources: ``pyopencl/invoker.py``, ``pyopencl/scan.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cachectl.layers.base.facts import Finding, Flag, Patch, State, Switch, When
from cachectl.layers.base.memos import forgetting
from cachectl.layers.base.switches import diagnosed, relative_cache_home
from cachectl.layers.pytools import Dictionaries, PytoolsDictionaries

VARIABLE: Final = "PYOPENCL_NO_CACHE"
#: Objects that remember the kernels they have compiled.
MEMOS: Final = tuple(
    Patch(f"pyopencl.{module}", owner, method, forgetting)
    for module, owner, method in (
        ("elementwise", "ElementwiseKernel", "get_kernel"),
        ("clrandom", "Random123GeneratorBase", "get_gen_kernel"),
        ("algorithm", "ListOfListsBuilder", "get_scan_kernel"),
        ("algorithm", "ListOfListsBuilder", "get_compress_kernel"),
        ("algorithm", "ListOfListsBuilder", "get_count_kernel"),
        ("algorithm", "ListOfListsBuilder", "get_write_kernel"),
        ("algorithm", "KeyValueSorter", "get_kernels"),
        ("bitonic_sort", "BitonicSort", "get_program"),
        ("bitonic_sort", "BitonicSort", "sort_b_prepare_wl"),
    )
)


def no_cache_switch(layer: str, *, on: bool) -> Switch:
    """Give the one switch that PyOpenCL has for its invokers and its binaries.

    ``pyopencl.invoker`` makes its dictionary only if the flag is off while it is imported, and later looks for
    it whenever the flag is off: hence the reloads.
    """
    return Switch(
        layer,
        set={} if on else {VARIABLE: "1"},
        unset=frozenset({VARIABLE}) if on else frozenset(),
        flags=(Flag("pyopencl", "_PYOPENCL_NO_CACHE", not on),),
        memos=MEMOS,
        drops=(("pyopencl.tools", "clear_first_arg_caches"),),
        reloads=(("pyopencl.invoker", "invoker_cache"), ("pyopencl.scan", "generic_scan_kernel_cache")),
        takes_effect=When.NOW,
    )


class PyOpenCLInvoker(PytoolsDictionaries):
    """What PyOpenCL remembers of the Python code that calls a kernel."""

    name = "pyopencl-invoker"
    title = "PyOpenCL kernel invokers"
    store = Dictionaries("pyopencl-invoker-pdict", lambda identifier: identifier.startswith("pyopencl-"))
    opened_by = ("pyopencl.invoker", "pyopencl.scan")

    def state(self) -> State:
        """Judge the variable, read when PyOpenCL is imported."""
        return self.judged("pyopencl", (VARIABLE,))

    def diagnose(self) -> Iterator[Finding]:
        """Yield what is wrong with the variables."""
        yield from diagnosed(self, "pyopencl", (VARIABLE,))
        yield from relative_cache_home(self)

    def switched(self, *, on: bool) -> Switch:
        """Give PyOpenCL's one switch."""
        return no_cache_switch(self.name, on=on)
