"""The layer on the page about adding layers passes the suite, and generated tables are complete."""

import re
import types
from pathlib import Path
from typing import Any

import pytest
from documents import DOCS, PAGE, listing, module_of_docs

from cachectl.cli.main import VERBS
from cachectl.layers.base.environment import Environment
from cachectl.layers.core.conformance import LayerConformance
from cachectl.layers.core.layer import Layer
from cachectl.layers.core.root import Condition
from cachectl.layers.core.switch import Ability
from cachectl.layers.registry import catalogue


def page(*captions: str) -> Any:  # noqa: ANN401 - a module
    """Return the module of the page, with what further blocks add to it."""
    module = types.ModuleType("toyc_cachectl")
    vars(module)["__file__"] = str(PAGE)
    for caption in filter(None, ("toyc_cachectl.py", *captions)):
        exec(compile(listing(caption), caption, "exec"), vars(module))  # noqa: S102 - our own page
    return module


def test_the_variants_of_the_page_do_what_it_says() -> None:
    module, home = page("variants"), {"HOME": "/h"}

    def layer(name: str, **variables: str) -> Layer:
        made: Layer = getattr(module, name)(Environment({**home, **variables}, Path("/account")))
        return made

    assert [root.path for root in layer("OffByDefault").roots()] == [Path("/h/.toyc")]
    for value, condition, said in (
        ({}, Condition.DISABLED, "off unless TOYC_PERSISTENT=1"),
        ({"TOYC_PERSISTENT": "1"}, Condition.ENABLED, "TOYC_PERSISTENT=1"),
    ):
        assert layer("OffByDefault", **value).state()[:2] == (condition, said)
    assert layer("OffByDefault").enable().set == {"TOYC_PERSISTENT": "1"}
    assert layer("OffByDefault").disable().unset == {"TOYC_PERSISTENT"}
    several = layer("SeveralValues")
    assert (several.disable().set, several.state().why) == ({"TOYC_CACHE": "0"}, "on unless TOYC_CACHE=0")
    assert layer("SeveralValues", TOYC_CACHE="off").state()[:2] == (Condition.DISABLED, "TOYC_CACHE=off")
    assert several.about.portability is not None
    assert several.about.portability.facts(several.environment) == {"toyc": None}
    module.Toyc.switch = module.SeveralValues.switch._replace(value=None)
    assert "no value that matches" in str(layer("Toyc").abilities()[Ability.DISABLE])


class TestToyc(LayerConformance):
    """The suite over the layer of the page, flat, and in the subfolders of a block there."""

    @pytest.fixture(autouse=True, params=["", "in subfolders"])
    def _listed(self, request: pytest.FixtureRequest) -> None:
        module = page(request.param)
        store = {"store": module.store} if request.param else {}
        self.folder, self.layer = "gpu0" if request.param else "", type("Toyc", (module.Toyc,), store)

    def make(self, environment: Environment) -> Layer:
        layer: Layer = self.layer(environment)
        return layer

    def seed(self, environment: Environment) -> None:
        folder = environment.home_folder / ".cache/toyc" / self.folder
        folder.mkdir(parents=True)
        for number, kernel in enumerate((b"axpy", b"mul")):
            (folder / f"{number:016x}.toyc").write_bytes(b"TOYC " + kernel + b"\n" + bytes(100))


def test_the_examples_of_the_page_about_stores_print_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "stores.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), "stores.md", "exec"), {"__name__": "stores"})  # noqa: S102 - our own page
    said = [line.rpartition("# ")[2] for block in blocks for line in block.splitlines() if "print(" in line]
    assert capsys.readouterr().out.splitlines() == said


def test_every_verb_has_a_page_with_its_options() -> None:
    folder = DOCS / "cli"
    index = (folder / "index.md").read_text(encoding="utf-8")
    for verb in VERBS:
        assert f"\n:path: {verb}\n" in (folder / f"{verb}.md").read_text(encoding="utf-8")
        assert f"[{verb}]({verb}.md)" in index
        assert f"\n{verb}\n" in index


def test_files_outside_the_documentation_name_pages_that_exist() -> None:
    repository = DOCS.parent
    named = [repository / name for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml")]
    named += [
        path for top in ("layers", "orchestrator", "packaging", ".github") for path in (repository / top).rglob("*.*")
    ]
    for path in named:
        if path.suffix in {".py", ".md", ".toml", ".yml", ".html", ".1"}:
            for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8")):
                assert (repository / page).is_file(), f"{path}: {page}"


def test_the_page_about_troubleshooting_is_that_of_the_catalogue() -> None:
    """After a change of a code, run docs/codes.py. A message that users paste leads to the code."""
    page = module_of_docs("codes").page()
    assert (DOCS / "troubleshooting.md").read_text() == page
    assert (DOCS / "verdicts.md").read_text() == module_of_docs("codes").verdicts()
    messages = {"failed to map segment": "noexec", "Db lock has failed to lock": "lock", "locking protocol": "network"}
    messages |= {"attempt to write a readonly database": "closed", "no devices found": "closed"}
    messages |= {"Ill-formed record": "malformed", "waited more than one minute on the lock file": "lock"}
    for message, code in messages.items():
        assert re.search(rf"(?m)^\| {message}[^|]*\| \[`{code}`\]", page), message
    sources = "".join(path.read_text() for path in (DOCS.parent / "layers").rglob("*.py"))
    declared = {code.name for code in catalogue()}
    assert set(re.findall(r'\bCode\(\s*"([\w-]+)"', sources)) == declared
