"""The tiers of the tests: what the default run leaves out, and how a test or a case is put there."""

import os
from typing import Any, NoReturn, TypeVar

import pytest

#: Tests that run with ``--all`` only, by their marker.
TIERS = {
    "hazard": "kills, faults and random worlds in large numbers",
    "upstream": "the test suites of pytools and PyOpenCL",
    "cluster": "MPI jobs, and the end of a job of Slurm",
    "environment": "older libraries, another driver, MPI, installer or scheduler than the extra brings, or a browser",
    "thorough": "more cases of an ability that the default run tries once",
}
#: Fixtures that need what the test extra does not bring.
ELSEWHERE = frozenset(
    {
        *("debian_pocl", "built_pocl", "intel_driver", "open_mpi", "rusticl_device", "installers"),
        *("rusticl_library", "debian_loader", "khronos_loader", "prefix_loader", "debian_pyopencl"),
        *("schedulers", "browser", "real_registry", "container_tools"),
    }
)

#: Whether this run has every tier; the conftest sets it before test modules are imported.
every_tier = False

#: What runs real libraries, and what only ``--all`` runs.
real, thorough_only = pytest.mark.real, pytest.mark.thorough

#: The number of the user nobody, a command that becomes that user, and tests which need the superuser for that.
NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser gives files away and becomes another user")

Amount = TypeVar("Amount", int, float, str)


def amount(few: Amount, many: Amount) -> Amount:
    """Return how many examples, or how much else, a test takes: few in the default tier, many with ``--all``."""
    return many if every_tier else few


def absent(reason: str) -> NoReturn:
    """Skip a test that lacks what the reason names; fail it in CI, which installs everything."""
    if os.environ.get("CI"):
        pytest.fail(f"CI {reason}")
    pytest.skip(reason)


def needing(*fixtures: str) -> list[Any]:
    """Return names of fixtures as parameters that only ``--all`` uses, for what the test extra does not bring."""
    return [pytest.param(fixture, marks=pytest.mark.environment) for fixture in fixtures]


def thorough(*cases: Any) -> list[Any]:  # noqa: ANN401 - whatever a test takes
    """Return cases of a parametrized test that only ``--all`` runs; a tuple is one case with several values."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough) for case in cases]
