"""What other systems read: the action's steps run by bash, and the recipes, which name what the project needs."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from homes import Home, make_home
from packaging.requirements import Requirement
from tiers import real, thorough_only

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXPRESSION = re.compile(r"\$\{\{ *(.*?) *\}\}")


def step(home: Home, number: int, values: dict[str, str]) -> dict[str, str]:
    """Run a step of the action as GitHub does, and return its outputs."""
    action = yaml.safe_load((REPOSITORY / "action.yml").read_text())
    one = action["runs"]["steps"][number]
    output = home.path / "GITHUB_OUTPUT"
    output.write_text("")
    variables: dict[str, Any] = {"RUNNER_TEMP": str(home.path), "GITHUB_ACTION_PATH": str(REPOSITORY)}
    variables |= {name: f"{home.path}/{name}" for name in (output.name, "GITHUB_STEP_SUMMARY")}
    for name, value in one["env"].items():
        variables[name] = EXPRESSION.sub(lambda use: values[use[1]], value)
    home.run("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", one["run"], **variables)
    return dict(line.split("=", 1) for line in output.read_text().splitlines())


@real
@thorough_only
def test_the_action_restores_what_it_saved(home: Home, tmp_path: Path) -> None:
    command = f"{sys.executable} {home.programs / 'kernels.py'} 1"
    values = {"inputs.python": sys.executable, "inputs.command": command, "inputs.key": "two words"}
    key = step(home, 0, values)
    assert re.fullmatch("cachectl-two words-[0-9a-f]{16}-", key["prefix"])
    values["steps.key.outputs.bundle"] = key["bundle"]
    assert int(step(home, 3, values)["misses"]) > 0
    assert "| pocl | 0 |" in (home.path / "GITHUB_STEP_SUMMARY").read_text()
    assert step(home, 4, values) == {"made": "true"}
    other_home = make_home(tmp_path / "other")
    step(other_home, 2, values)
    assert step(other_home, 3, values) == {"misses": "0", "kernels": "0"}


def test_only_runs_of_trusted_code_save() -> None:
    default = yaml.safe_load((REPOSITORY / "action.yml").read_text())["inputs"]["save"]["default"]
    assert "github.ref == format('refs/heads/{0}', github.event.repository.default_branch)" in default
    assert set(re.findall('"(\\w+)"', default)) == {"push", "schedule", "workflow_dispatch"}


def test_the_matrix_has_every_python_that_the_project_names() -> None:
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/checks.yml").read_text())
    assert workflow["jobs"]["tests"]["strategy"]["matrix"]["python"] == named
    assert named[0] == PROJECT["requires-python"].removeprefix(">=")


@pytest.mark.parametrize("recipe", ["conda-forge/meta.yaml", "spack/py-opencl-cachectl/package.py"])
def test_recipes_name_what_the_project_needs(recipe: str) -> None:
    text = (REPOSITORY / "packaging" / recipe).read_text()
    for needed in map(Requirement, PROJECT["dependencies"]):
        (version,) = needed.specifier
        names = "[-_.]".join(map(re.escape, re.split("[-_.]", needed.name)))
        assert re.search(rf"\b{names}(?: >=|@){version.version}\b", text), f"{recipe} lacks {needed}"
    assert f"{PROJECT['version']}" in text


def test_the_citation_has_the_version() -> None:
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == PROJECT["version"]
