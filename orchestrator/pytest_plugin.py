"""A pytest plug-in: tests that compile cold, sessions without caches, timelines of tests, and the caches' state.

It is installed with cachectl and loaded into every pytest session of that Python, so it imports nothing until it is
used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import TypeVar

    from cachectl.switching.disabled import Held

    T = TypeVar("T")

_OPTION = "--no-kernel-caches"
_TIMELINES = "--cachectl-timeline"
#: Limit on the characters of a file name that are taken from a test.
_LONGEST_NAME = 200
#: The attribute of pytest's config in which a session with caches off keeps its state.
_OFF = "_cachectl_off"


@pytest.fixture
def cold_caches(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Held]]:
    """Switch every kernel cache off for this test and its child processes, as ``cachectl.disabled()`` does.

    Yields the status of each layer. If a cache cannot be switched off, the test is an error that names it, and is not
    run.
    """
    import cachectl

    yield from _inside(cachectl.disabled(), request)


@pytest.fixture
def isolated_caches(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Switch every kernel cache on, in an empty root of this test's own, as ``cachectl.isolated()`` does.

    Yields the root. Libraries that have opened their caches cannot be moved: such a test is an error that names them.
    """
    import cachectl

    yield from _inside(cachectl.isolated(), request)


def _inside(block: AbstractContextManager[T], request: pytest.FixtureRequest) -> Iterator[T]:
    """Yield what a block yields; a test whose caches cannot be switched fails in one line, with how to run it."""
    from cachectl.switching.disabled import StillOn

    try:
        with block as value:
            yield value
    except StillOn as error:
        how = (
            f"run the test in a process of its own: pytest {request.node.nodeid}, and import the libraries in the test"
        )
        raise pytest.fail.Exception(f"{request.fixturename}: {error.what}; {how}", pytrace=False) from None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("cachectl")
    group.addoption(
        _TIMELINES,
        metavar="DIR",
        help="write where the time of each test that uses the OpenCL stack goes: a file that Perfetto opens",
    )
    group.addoption(
        _OPTION,
        action="store_true",
        default=False,
        help="switch every kernel cache (loopy, PyOpenCL, PoCL, CUDA, MIOpen) off for the whole session",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Switch off before any conftest can import a library or start a driver."""
    _switch_off(early_config, asked=getattr(early_config.known_args_namespace, "no_kernel_caches", False))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Switch off if the plug-in was loaded too late for the hook before."""
    _switch_off(config, asked=config.getoption(_OPTION, default=False))
    if (folder := config.getoption(_TIMELINES, default=None)) is not None:
        import os

        try:
            os.makedirs(folder, exist_ok=True)
            # Tests may change the working folder.
            config.option.cachectl_timeline = os.path.abspath(folder)
        except OSError as error:
            raise pytest.UsageError(f"{_TIMELINES}: {error.strerror}: {folder}") from None


def _switch_off(config: pytest.Config, *, asked: bool) -> None:
    if not asked or hasattr(config, _OFF):
        return
    from contextlib import ExitStack

    import cachectl
    from cachectl.switching.disabled import StillOn

    block = ExitStack()
    try:
        setattr(config, _OFF, block.enter_context(cachectl.disabled()))
    except StillOn as error:
        how = "start these libraries from a conftest, or run: cachectl run --no-cache -- pytest"
        raise pytest.UsageError(f"{_OPTION}: {error.what}; {how}") from None
    # pytest_unconfigure is not called if a session ends before it is configured.
    config.add_cleanup(block.close)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write the timeline of a test with its fixtures, if it is asked for."""
    folder = item.config.getoption(_TIMELINES, default=None)
    if folder is None:
        yield
        return
    import cachectl

    with cachectl.traced() as traced:
        yield
    if traced.timeline is not None and traced.spans:
        import re
        from contextlib import suppress
        from dataclasses import replace
        from pathlib import Path

        from cachectl.watching import timeline_files

        place = Path(folder, re.sub(r"[^\w.\[\]-]+", "_", item.nodeid)[-_LONGEST_NAME:] + ".json")
        try:
            place.write_bytes(timeline_files.chrome_trace(replace(traced.timeline, command=("pytest", item.nodeid))))
        except OSError as error:
            # A session may turn warnings into errors, which would end it here.
            with suppress(pytest.PytestWarning):
                item.warn(pytest.PytestWarning(f"{_TIMELINES}: {error.strerror}: {place}"))


def pytest_report_header(config: pytest.Config) -> str:
    """Return whether tests use each layer; in a session with caches off, only the status of each layer."""
    held: Mapping[str, Held] | None = getattr(config, _OFF, None)
    if held is not None:
        return f"kernel caches ({_OPTION}): {', '.join(f'{name} {hold.status}' for name, hold in held.items())}"
    try:
        return f"kernel caches: {_states()}"
    except Exception as error:  # noqa: BLE001 - a header must not end somebody's tests
        return f"kernel caches: unknown ({error})"


def _states() -> str:
    """Return the state of every built-in layer in one line; plug-ins are not loaded into other people's tests."""
    from cachectl.layers.base.facts import Condition, Scope
    from cachectl.stack import Stack

    states = {layer.name: layer.state() for layer in Stack(plugins=False) if layer.about.scope is Scope.USER}
    words = [
        f"{name} {state.condition.value}" + (f" ({state.why})" if state.condition is Condition.DISABLED else "")
        for name, state in states.items()
        if state.condition is not Condition.ABSENT
    ]
    absent = [name for name, state in states.items() if state.condition is Condition.ABSENT]
    return ", ".join([*words, *([f"absent: {' '.join(absent)}"] if absent else [])])
