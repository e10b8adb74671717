"""Times the stages of loopy inside the program that uses it: kernels made, preprocessed, scheduled, code generated.

A trace copies this file next to its observer: it imports only the standard library, and runs on Python 3.8.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from cachectl.layers.inside.observer import Invocation, Notes

#: The stage of each function, by its module and name. Functions of ``loopy.transform`` make kernels too.
_STAGES = {
    ("loopy.kernel.creation", "make_kernel"): "create",
    ("loopy.kernel.creation", "make_function"): "create",
    ("loopy.kernel.tools", "add_dtypes"): "create",
    ("loopy.translation_unit", "merge"): "create",
    ("loopy.type_inference", "infer_unknown_types"): "preprocess",
    ("loopy.preprocess", "preprocess_program"): "preprocess",
    ("loopy.preprocess", "make_arrays_for_sep_arrays"): "preprocess",
    ("loopy.schedule", "linearize"): "schedule",
    ("loopy.schedule", "get_one_linearized_kernel"): "schedule",
    ("loopy.codegen", "generate_code_v2"): "codegen",
}


def watch(module: ModuleType, notes: Notes) -> None:
    """Time loopy's functions, and those of its executors."""
    if module.__name__ == "loopy":
        _watch_functions(module, notes)
    elif module.__name__.startswith("loopy.target.c."):
        # The compiler of loopy's target for C compiles in each run.
        notes.put(module.CCompiler, "build", notes.timed(module.CCompiler.build, "compile"))
    else:
        _watch_executor(module.PyOpenCLExecutor, notes)


def _watch_functions(loopy: ModuleType, notes: Notes) -> None:
    def about(call: Invocation) -> dict[str, object]:
        # The kernels in the result, or else in the argument.
        return {"kernels": notes.kernels_of((call.value, *call.arguments[:1]), 1)}

    stages = dict(_STAGES)
    for value in vars(loopy).values():
        if str(getattr(value, "__module__", "")).startswith("loopy.transform.") and type(value) is type(watch):
            stages[value.__module__, value.__name__] = "create"
    timed = {}
    for (module, name), stage in stages.items():
        function = vars(sys.modules.get(module, loopy)).get(name)
        if function is not None:
            # Stages use transformations too.
            timed[id(function)] = notes.timed(function, stage, about, outermost=stage == "create")
            # A function is pickled by its name in this module.
            notes.put(sys.modules[module], name, timed[id(function)])
    for name, value in list(vars(loopy).items()):
        if id(value) in timed:
            notes.put(loopy, name, timed[id(value)])


def _watch_executor(executor: type, notes: Notes) -> None:
    def launched(_: Invocation) -> int:
        return getattr(notes.here, "launched", 0)

    def about(call: Invocation) -> dict[str, object]:
        return {"kernels": [call.arguments[0].entrypoint]}

    def called(call: Invocation) -> None:
        if launched(call) != call.before:
            notes.span("launch", call.start, name="first call", **about(call))

    notes.wrap(executor, "__call__", called, launched)
    notes.put(executor, "get_invoker_uncached", notes.timed(vars(executor)["get_invoker_uncached"], "codegen", about))
