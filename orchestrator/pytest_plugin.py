"""A pytest plug-in: tests that compile cold, and sessions without caches or with portable builds.

Every pytest session of a Python with cachectl loads it, so it imports no layer until it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack

import pytest

import cachectl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import TypeVar

    from cachectl.switching.disabled import Held

    T = TypeVar("T")

_OPTION, _PORTABLE = "--no-kernel-cache", "--portable-builds"
#: The attribute of pytest's config in which a session with caches off keeps its state.
_OFF = "_cachectl_off"


@pytest.fixture
def disabled_caches(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Held]]:
    """Switch every kernel cache off for this test and its child processes, as ``cachectl.disabled()`` does.

    Yields the status of each layer. If a cache cannot be switched off, the test does not run, and its error names the
    cache.
    """
    yield from _inside(cachectl.disabled(), request)


@pytest.fixture
def isolated_caches(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Switch every kernel cache on, in an empty root for this test, as ``cachectl.isolated()`` does.

    Yields the root. If libraries have already opened their caches, the test does not run: its error names them.
    """
    yield from _inside(cachectl.isolated(), request)


def _inside(block: AbstractContextManager[T], request: pytest.FixtureRequest) -> Iterator[T]:
    """Yield what a block yields; if it cannot switch the caches, fail with one line that says how to run the test."""
    try:
        with block as value:
            yield value
    except cachectl.StillOn as error:
        how = f"run the test alone: pytest {request.node.nodeid}, and import the libraries in the test"
        raise pytest.fail.Exception(f"{request.fixturename}: {error.what}; {how}", pytrace=False) from None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("cachectl")
    group.addoption(
        _OPTION,
        action="store_true",
        help="switch every kernel cache (loopy, PyOpenCL, PoCL, CUDA, MIOpen) off for the whole session",
    )
    group.addoption(
        _PORTABLE,
        action="store_true",
        help="omit PyOpenCL's include path from builds that do not need it: their entries hit at any path",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Switch off before any conftest can import a library or start a driver."""
    _switch_off(early_config, asked=getattr(early_config.known_args_namespace, "no_kernel_cache", False))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Switch off if the plug-in was loaded too late for the previous hook; make builds portable if requested."""
    _switch_off(config, asked=config.getoption(_OPTION, default=False))
    if config.getoption(_PORTABLE, default=False):
        block = ExitStack()
        block.enter_context(cachectl.portable())
        config.add_cleanup(block.close)


def _switch_off(config: pytest.Config, *, asked: bool) -> None:
    if not asked or hasattr(config, _OFF):
        return
    block = ExitStack()
    try:
        setattr(config, _OFF, block.enter_context(cachectl.disabled()))
    except cachectl.StillOn as error:
        how = "start these libraries from a conftest, or run: cachectl run --no-cache -- pytest"
        raise pytest.UsageError(f"{_OPTION}: {error.what}; {how}") from None
    # pytest_unconfigure is not called if a session ends before it is configured.
    config.add_cleanup(block.close)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return the status of each layer in a session with caches off."""
    held: Mapping[str, Held] | None = getattr(config, _OFF, None)
    if held is None:
        return None
    return f"kernel caches ({_OPTION}): {', '.join(f'{name} {hold.status}' for name, hold in held.items())}"
