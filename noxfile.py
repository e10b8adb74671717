"""Checks in environments of their own. ``nox -l`` lists them; ``nox -s tests`` runs the tests on every Python found."""

from __future__ import annotations

from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|venv"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["tests", "lint", "types", "docs", "distributions"]

PROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PROJECT)


def install(session: nox.Session, group: str) -> None:
    """Install everything with a group of tools, whatever the age of pip."""
    session.install(".[all]", *nox.project.dependency_groups(PROJECT, group))


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the tests; arguments after ``--`` go to pytest."""
    install(session, "test")
    session.run("python", "-m", "pytest", "-n", "auto", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Run the demonstration on PoCL."""
    session.install(".[demo]")
    session.run("cachectl", "demo")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format."""
    session.install("ruff>=0.15")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    install(session, "dev")
    session.run("mypy", "-p", "cachectl")
    session.run("mypy", "tests", "benchmarks")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; every warning is an error."""
    install(session, "dev")
    session.run("sphinx-build", "-W", "-b", "html", "docs", "docs/_build/html")


@nox.session
def distributions(session: nox.Session) -> None:
    """Build the wheel and the source distribution, check both, and run what the source distribution installs."""
    session.install("build", "twine", "check-wheel-contents")
    folder = Path(session.create_tmp()) / "dist"
    session.run("python", "-m", "build", "--outdir", str(folder))
    session.run("twine", "check", "--strict", *map(str, folder.iterdir()))
    session.run("check-wheel-contents", *map(str, folder.glob("*.whl")))
    session.install(*map(str, folder.glob("*.tar.gz")))
    with session.chdir(folder):
        session.run("cachectl", "report")
