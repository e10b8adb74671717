"""Portable builds: programs of PyOpenCL that hit wherever it lies (:mod:`cachectl.layers.inside.portable_builds`).

An observer takes them into the Python programs of a command, and notes each build. The ledger keeps when these were,
because nothing in the bytes of an entry says that its key is of a portable build.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from cachectl.layer_set import LayerSet
from cachectl.layers.base.environment import Environment
from cachectl.layers.core.parts import Lookups
from cachectl.layers.inside import observer, portable_builds
from cachectl.switching import child, overlay
from cachectl.watching import ledger
from cachectl.watching.program_events import PORTABLE, Misfit, PortableBuild, of_kind, read_events
from cachectl.watching.trace import make_observer


@contextmanager
def building(stack: LayerSet, notice: Callable[[str], None], *, portable: bool = True) -> Iterator[LayerSet]:
    """Yield the layers in an environment whose Python programs build portably; without ``portable`` those given.

    When the block has ended, ``notice`` gets a line for each kernel that needs PyOpenCL's folder, and for a PyOpenCL
    that does not add it as it is known to.
    """
    with ExitStack() as block:

        def prepare() -> LayerSet:
            here, part = stack.environment, Lookups(watchers={"pyopencl": Path(portable_builds.__file__)})
            folder = block.enter_context(child.isolated_root(here, notice=notice))
            _, variables = make_observer(folder, here, {"portable": part}, (), kind="portable")
            return type(stack)(here.with_variables(variables))

        # An extra: the command runs in any case.
        made = child.try_extra("no build is portable", prepare, notice) if portable else None
        try:
            yield made or stack
        finally:
            step = partial(remember, (made or stack).environment)
            for line in child.try_extra("portable builds are not remembered", step, notice) or ():
                notice(line)


@contextmanager
def portable() -> Iterator[None]:
    """Have PyOpenCL build portably in a block, in this process and the Python children it starts.

    A build whose source needs no header of PyOpenCL's folder is done without that folder in its options, so that its
    entry hits wherever PyOpenCL lies. Every other build is done as without the block, and is a warning at its end.
    """
    lines: list[str] = []
    try:
        with building(LayerSet(), lines.append) as stack, ExitStack() as block:
            if events := stack.environment.get(PORTABLE):
                variables = {name: stack.environment.get(name) for name in (PORTABLE, "PYTHONPATH")}
                block.enter_context(overlay.applied(overlay.variables(variables)))
                block.callback(observer.observe(events, str(Path(events).with_name("site"))).stop)
            yield
    finally:
        for line in lines:
            # The line of the user's block is behind its context manager.
            warnings.warn(line, RuntimeWarning, stacklevel=3)


def remember(environment: Environment) -> list[str]:
    """Remember when programs of an environment have built portably, and what other kernels need.

    Returns a line for each of these. Does nothing outside of :func:`building`. Raises :class:`CachectlError`.
    """
    if (folder := environment.get(PORTABLE)) is None:
        return []
    events, _ = read_events(Path(folder))
    builds = of_kind(events, PortableBuild)
    kept = {name: build.kept for build in builds if build.kept for name in build.kernels or ["a program"]}
    took = ((build.at, build.when.seconds) for build in builds if not build.kept)
    # A ledger with a negative time would be damaged.
    spans = {(max(0.0, at - seconds), at) for at, seconds in took}

    def update(remembered: ledger.Ledger) -> None:
        remembered.portable.extend(spans.difference(remembered.portable))
        remembered.kept.update(kept)

    if builds:
        ledger.change(environment, update)
    failed = {misfit.error for misfit in of_kind(events, Misfit)}
    misfits = [f"no build is portable: {line}" for line in sorted(failed)]
    return misfits + [f"not portable: {name} needs {need}" for name, need in kept.items()]
