"""The command that adds a library works for the way cachectl is installed: it is run, and then the library is there."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from cachectl.layers.host.installing import Installation, _requirement

PROJECT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Installers:
    """Real pipx and uv, which keep everything below one folder."""

    folder: Path
    source: Path

    @property
    def variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIPX_", "PYTHON"))}
        path = f"{os.environ['CACHECTL_TEST_INSTALLERS']}:{kept.get('PATH', '')}"
        return {**kept, "HOME": str(self.folder), "PATH": path, "UV_PYTHON_DOWNLOADS": "never"}

    def run(
        self, line: str, changes: Mapping[str, str] | None = None, *, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a line in a shell."""
        done = subprocess.run(
            ["sh", "-c", line],
            env={**self.variables, **(changes or {})},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        if check and done.returncode:
            pytest.fail(f"{line} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    def advice(self, cachectl: Path) -> str:
        """Return the command that the message of a missing fsspec ends with."""
        done = self.run(f"{cachectl} export memory://bundle cuda", check=False)
        assert done.returncode == 1, done.stderr
        (line,) = done.stderr.splitlines()
        before, _, command = line.partition("to add them: ")
        assert before.endswith("URLs need packages that are not installed; ")
        return command

    def works(self, cachectl: Path) -> bool:
        """Return whether fsspec is installed."""
        return self.run(f"{cachectl} export memory://bundle cuda", check=False).returncode == 0


@pytest.fixture
def installers(tmp_path: Path, compute_cache: Callable[[Path], None]) -> Installers:
    """Return pipx and uv from the folder that ``CACHECTL_TEST_INSTALLERS`` names, and a copy of this project."""
    if not os.environ.get("CACHECTL_TEST_INSTALLERS"):
        reason = "needs pipx and uv in a folder that CACHECTL_TEST_INSTALLERS names"
        if os.environ.get("CI"):
            pytest.fail(f"CI {reason}")
        pytest.skip(reason)
    source = tmp_path / "the source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(PROJECT / name, source / name)
    for name in ("layers", "orchestrator"):
        shutil.copytree(PROJECT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PROJECT / "packaging" / "share", source / "packaging" / "share")
    compute_cache(tmp_path / "home" / ".nv" / "ComputeCache")
    return Installers(tmp_path / "home", source)


def test_a_tool_of_pipx_gets_it_injected(installers: Installers) -> None:
    installers.run(f"pipx install --python {sys.executable} {shlex.quote(str(installers.source))}")
    cachectl = installers.folder / ".local" / "bin" / "cachectl"
    command = installers.advice(cachectl)
    assert command == "pipx inject opencl-cachectl fsspec"
    installers.run(command)
    assert installers.works(cachectl)


def test_a_tool_of_pipx_in_another_place_is_found_there(installers: Installers) -> None:
    home = installers.folder / "tools"
    variables = {"PIPX_HOME": str(home), "PIPX_BIN_DIR": str(home / "bin")}
    source = shlex.quote(str(installers.source))
    installers.run(f"pipx install --suffix=-two --python {sys.executable} {source}", variables)
    command = installers.advice(home / "bin" / "cachectl-two")
    assert command == f"env PIPX_HOME={home} pipx inject opencl-cachectl-two fsspec"
    installers.run(command)
    assert installers.works(home / "bin" / "cachectl-two")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads no TOML")
@pytest.mark.parametrize("editable", [False, True])
def test_a_tool_of_uv_keeps_its_source_and_its_other_libraries(installers: Installers, *, editable: bool) -> None:
    source = shlex.quote(str(installers.source))
    how = f"--editable {source}" if editable else source
    installers.run(f"uv tool install --python {sys.executable} --with iniconfig {how}")
    cachectl = installers.folder / ".local" / "bin" / "cachectl"
    receipt = installers.folder / ".local" / "share" / "uv" / "tools" / "opencl-cachectl" / "uv-receipt.toml"
    before = receipt.read_text()
    command = installers.advice(cachectl)
    assert command.startswith("uv tool install ")
    installers.run(command)
    assert installers.works(cachectl)
    assert str(installers.source) in receipt.read_text()
    assert ("editable" in receipt.read_text()) == ("editable" in before) == editable
    assert '"iniconfig"' in receipt.read_text()
    # It is still there after an upgrade, as a library that uv pip adds is not.
    installers.run("uv tool upgrade opencl-cachectl")
    assert installers.works(cachectl)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads no TOML")
def test_a_tool_of_uv_in_another_place_is_found_there(installers: Installers) -> None:
    tools, programs = installers.folder / "tools", installers.folder / "programs"
    source = shlex.quote(str(installers.source))
    variables = {"UV_TOOL_DIR": str(tools), "UV_TOOL_BIN_DIR": str(programs)}
    installers.run(f"uv tool install --python {sys.executable} {source}", variables)
    installers.run(installers.advice(programs / "cachectl"))
    assert installers.works(programs / "cachectl")
    assert not (installers.folder / ".local" / "bin").exists()


@pytest.mark.parametrize("seed", [False, True])
def test_an_environment_of_uv_may_have_no_pip(installers: Installers, *, seed: bool) -> None:
    source = shlex.quote(str(installers.source))
    installers.run(f"uv venv --python {sys.executable} {'--seed ' * seed}env && uv pip install -p env {source}")
    cachectl = installers.folder / "env" / "bin" / "cachectl"
    command = installers.advice(cachectl)
    assert command.startswith(f"{installers.folder}/env/bin/python" if seed else "uv pip install --python ")
    installers.run(command)
    assert installers.works(cachectl)


# ---------------------------------------------------------------------- places that are rare


@pytest.fixture
def place(tmp_path: Path) -> Installation:
    """Return an environment with pip in a folder with nothing in it."""
    prefix, system = tmp_path / "my env", tmp_path / "system"
    prefix.mkdir()
    system.mkdir()
    return Installation(prefix, system, prefix / "bin" / "python", system, has_pip=True, home=tmp_path)


def changed(place: Installation, **changes: object) -> Installation:
    from dataclasses import replace

    return replace(place, **changes)  # type: ignore[arg-type]


def test_pip_is_that_of_the_python_that_runs_cachectl(place: Installation) -> None:
    command = place.command_to_add(["pyopencl[pocl]", "loopy"])
    assert command == f"'{place.prefix}/bin/python' -m pip install 'pyopencl[pocl]' loopy"
    # Conda's environments have a pip of their own, with which cachectl came.
    (place.prefix / "conda-meta").mkdir()
    assert changed(place, base_prefix=place.prefix).command_to_add(["pyopencl[pocl]", "loopy"]) == command


def test_a_python_of_the_system_is_overruled_as_it_was_before(place: Installation) -> None:
    (place.library / "EXTERNALLY-MANAGED").touch()
    # An environment is its owner's, whatever the Python it is made from.
    assert "--break-system-packages" not in place.command_to_add(["fsspec"])
    system = changed(place, prefix=place.base_prefix, python=Path("/usr/bin/python3"))
    assert system.command_to_add(["fsspec"]) == "/usr/bin/python3 -m pip install --break-system-packages fsspec"


def test_without_pip_it_is_brought_first(place: Installation) -> None:
    python = shlex.quote(str(place.python))
    command = changed(place, has_pip=False).command_to_add(["fsspec"])
    assert command == f"{python} -m ensurepip && {python} -m pip install fsspec"


def test_tools_for_all_users_are_the_administrators(place: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachectl.layers.host.installing._PIPX_GLOBAL", place.prefix.parent)
    prefix = place.prefix.parent / "venvs" / "opencl-cachectl"
    prefix.mkdir(parents=True)
    (prefix / "pipx_metadata.json").touch()
    command = changed(place, prefix=prefix).command_to_add(["fsspec"])
    assert command == "sudo pipx inject --global opencl-cachectl fsspec"


@pytest.mark.parametrize("receipt", ["", "tool = 1", "[tool]\nrequirements = []", "[tool]\nrequirements = [1]", "\0"])
def test_a_receipt_that_cannot_be_read_leaves_uv_pip(place: Installation, receipt: str) -> None:
    (place.prefix / "uv-receipt.toml").write_text(receipt)
    assert place.command_to_add(["fsspec"]) == f"uv pip install --python '{place.python}' fsspec"


def test_sources_of_a_receipt() -> None:
    name = {"name": "opencl-cachectl"}
    assert _requirement("", {**name, "specifier": "==0.1"}) == ["opencl-cachectl==0.1"]
    assert _requirement("--with", {"name": "a", "extras": ["b", "c"]}) == ["--with", "a[b,c]"]
    assert _requirement("", {**name, "git": "https://h/r?tag=v1"}) == ["opencl-cachectl @ git+https://h/r@v1"]
    assert _requirement("", {**name, "git": "https://h/r"}) == ["opencl-cachectl @ git+https://h/r"]
    assert _requirement("", {**name, "url": "https://h/x.whl"}) == ["opencl-cachectl @ https://h/x.whl"]
    assert _requirement("", {**name, "path": "/a b/x.whl"}) == ["opencl-cachectl @ file:///a%20b/x.whl"]
    assert _requirement("--with", {"name": "a", "editable": "/a"}) == ["--with-editable", "/a"]
