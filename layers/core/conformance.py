"""The conformance tests for every layer, built-in or plug-in.

Subclass :class:`LayerConformance` in a test module, define ``make`` and ``seed``, and run pytest::

    class TestMine(LayerConformance):
        def make(self, environment):
            return MyLayer(environment)

        def seed(self, environment):
            subprocess.run([sys.executable, "fill_my_cache.py"], env=dict(environment.variables), check=True)

Each test gets a fresh home. ``seed`` must make at least two entries, preferably with the real library. The suite does
not import pytest: it only needs plain assertions and the fixture ``tmp_path``.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import ClassVar
from unittest import SkipTest

from cachectl.layers.base import errors
from cachectl.layers.base.environment import Environment
from cachectl.layers.core import store
from cachectl.layers.core.entry import Artifact
from cachectl.layers.core.layer import Layer, get_many, put_many
from cachectl.layers.core.root import Condition
from cachectl.layers.core.selection import Selection
from cachectl.layers.core.switch import Ability


class LayerConformance(ABC):
    """Tests of the promises of the layer interface, on real content."""

    #: The most files to damage, one after another.
    damaged_files: ClassVar[int] = 40

    @abstractmethod
    def make(self, environment: Environment) -> Layer:
        """Make the layer under test."""

    @abstractmethod
    def seed(self, environment: Environment) -> None:
        """Fill the cache of the environment with at least two entries."""

    def environment(self, home: Path) -> Environment:
        """Return an environment whose roots are all under ``home``; override it to set more variables.

        The home of the account is another folder: a layer must use ``environment.home_folder``, as its library does.
        """
        variables = {"HOME": str(home), "PATH": os.defpath}
        account = home.with_name(f"{home.name}-of-the-account")
        # No program uses a fresh home.
        return Environment(
            variables, home=account, cwd=home, temporary=home / "tmp", processes=nobody(home.parent / "processes")
        )

    def empty(self, tmp_path: Path) -> Layer:
        """Return the layer in a fresh home."""
        home = tmp_path / "home"
        home.mkdir()
        layer = self.make(self.environment(home))
        # The tests clear and damage the roots.
        outside = [str(root.path) for root in layer.roots() if not root.path.is_relative_to(home)]
        assert not outside, f"roots outside the home of the test: {', '.join(outside)}; override environment()"
        return layer

    def seeded(self, tmp_path: Path, *needed: Ability) -> Layer:
        """Return the layer in a fresh home with content; skip the test if the layer lacks a ``needed`` ability."""
        layer = self.empty(tmp_path)
        for ability in needed:
            if (reason := layer.abilities()[ability]) is not None:
                raise SkipTest(f"{layer.name} cannot {ability.value}: {reason}")
        self.seed(layer.environment)
        return self.make(layer.environment)

    def test_an_empty_home_is_no_fault(self, tmp_path: Path) -> None:
        """Roots depend only on the environment; there are no entries, plans or findings, and every key is a miss."""
        layer = self.empty(tmp_path)
        roots = layer.roots()
        assert roots == layer.roots() == self.make(layer.environment).roots()
        assert all(root.path.is_absolute() and root.source for root in roots)
        assert list(layer.entries()) == []
        assert not any(list(layer.store.verify(root)) for root in roots)
        if can(layer, Ability.CLEAR):
            plan = layer.plan_clear()
            assert (plan.entries, plan.failed) == ((), ())
        if can(layer, Ability.GET):
            assert layer.get("no such key") is None
        assert snapshot(tmp_path / "home") == {}

    def test_looking_writes_nothing(self, tmp_path: Path) -> None:
        """State, scan, usage, verify, diagnose, get and plan change no byte, name or modification time.

        The state and every missing ability have a reason.
        """
        layer = self.seeded(tmp_path)
        before = snapshot(tmp_path, times=True)
        assert layer.state().why
        assert all(reason is None or len(reason.split()) > 2 for reason in layer.abilities().values())  # noqa: PLR2004
        keys = [entry.key for entry in layer.entries()]
        assert len(keys) >= 2, "seed at least two entries"  # noqa: PLR2004
        list(layer.diagnose())
        _look(layer)
        if can(layer, Ability.GET):
            layer.get(keys[0])
        if can(layer, Ability.CLEAR):
            assert layer.plan_clear().entries
        assert snapshot(tmp_path, times=True) == before

    def test_a_scan_repeats(self, tmp_path: Path) -> None:
        """Keys are unique, stable and valid, and usage agrees with the scan."""
        layer = self.seeded(tmp_path)
        first = list(layer.entries())
        assert [entry.key for entry in first] == [entry.key for entry in layer.entries()]
        assert len({(entry.root, entry.key) for entry in first}) == len(first)
        roots = {root.path: root for root in layer.roots()}
        for root in roots.values():
            assert layer.store.usage(root) == store.sum_usage(layer.store.scan(root, contents=False))
        for entry in first:
            assert entry.layer == layer.name
            assert entry.bytes >= 0
            assert entry.stale is not True or entry.stale_because
            assert layer.store.kind_of(roots[entry.root], entry.key) in (store.ENTRY, None)

    def test_what_was_taken_out_goes_back_in(self, tmp_path: Path) -> None:
        """A removed entry is put back among the others and reads the same; putting an equal one changes nothing."""
        layer = self.seeded(tmp_path, Ability.GET)
        read = _artifacts(layer)
        assert get_many(layer, [*read, "no such key"]) == read
        artifacts = [artifact for artifact in read.values() if artifact is not None]
        victim = artifacts[0]
        assert victim.form in layer.store.forms
        if not can(layer, Ability.PUT):
            return
        before = snapshot(tmp_path)
        layer.put(victim.key, victim)
        foreign, *others = put_many(layer, [victim._replace(form="another/0"), *artifacts[1:]])
        assert isinstance(foreign, errors.Refused)
        assert others == [False] * len(artifacts[1:])
        assert snapshot(tmp_path) == before
        if not can(layer, Ability.CLEAR):
            return
        layer.clear(layer.plan_clear(Selection(key=victim.key)))
        assert layer.get(victim.key) is None
        assert put_many(layer, artifacts) == [artifact == victim for artifact in artifacts]
        assert layer.get(victim.key) == victim

    def test_a_foreign_key_and_damaged_bytes_are_not_put(self, tmp_path: Path) -> None:
        """An artifact whose key does not have the form of the layer's keys is refused and changes nothing.

        So is a truncated one; if the layer cannot detect that, it at least reads back unchanged.
        """
        layer = self.seeded(tmp_path, Ability.PUT, Ability.GET)
        artifact = layer.get(next(layer.entries()).key)
        assert artifact is not None
        before = snapshot(tmp_path)
        for key in ("no such/../key", f"../{artifact.key}"):
            error = store.attempt(partial(layer.put, key, artifact._replace(key=key)))
            assert isinstance(error, errors.LayerError)
        assert snapshot(tmp_path) == before
        # Without padding at the end, as in a tar, an artifact is still complete.
        content = artifact.data.rstrip(b"\0") or artifact.data
        cut = artifact._replace(data=content[: len(content) // 2])
        error = store.attempt(partial(layer.put, artifact.key, cut, replace=True))
        assert layer.get(artifact.key) == (cut if error is None else artifact)

    def test_clear_removes_exactly_the_plan(self, tmp_path: Path) -> None:
        """A plan of one entry, then of all, removes exactly those, once; other entries and foreign files stay."""
        layer = self.seeded(tmp_path, Ability.CLEAR)
        strangers = [root.path / "a stranger.txt" for root in layer.roots() if root.path.is_dir()]
        for stranger in strangers:
            stranger.write_text("not the layer's own")
        victim, *others = layer.entries()
        kept = _artifacts(layer)
        del kept[victim.key]
        before = snapshot(tmp_path, times=True)
        plan = layer.plan_clear(Selection(key=victim.key))
        assert layer.plan_clear().removed == len(others) + 1
        assert [planned.key for planned in plan.entries] == [victim.key]
        assert snapshot(tmp_path, times=True) == before
        outcome, again = layer.clear(plan), layer.clear(plan)
        assert (outcome.removed, outcome.failed) == (1, ())
        assert (again.removed, len(again.skipped)) == (0, 1)
        assert again.skipped[0].because
        assert _artifacts(layer) == kept
        plan = layer.plan_clear()
        outcome = layer.clear(plan)
        named = [planned.key for planned in plan.entries if not planned.is_orphan]
        assert len(named) == len(set(named)) == outcome.removed == plan.removed > 0
        assert (plan.skipped, ()) == (outcome.skipped, outcome.failed)
        assert list(layer.entries()) == []
        assert all(stranger.read_text() == "not the layer's own" for stranger in strangers)
        assert layer.clear(layer.plan_clear()).removed == 0

    def test_damage_is_a_problem_and_no_exception(self, tmp_path: Path) -> None:
        """Truncated, emptied or overwritten files never stop a scan, usage or verify."""
        layer = self.seeded(tmp_path)
        files = _files(layer)
        for path in files[:: -(-len(files) // self.damaged_files) or 1]:
            content = path.read_bytes()
            for damaged in (b"", content[: len(content) // 2], b"\xff" * len(content)):
                path.write_bytes(damaged)
                _look(layer)
            path.write_bytes(content)

    def test_what_verify_finds_damaged_can_be_removed(self, tmp_path: Path) -> None:
        """Removing damaged entries removes those that verify reports, after which it reports none."""
        layer = self.seeded(tmp_path, Ability.CLEAR)
        if layer.about.precious:
            return
        assert not layer.plan_clear(damaged=True).entries
        for path in _files(layer)[:1]:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        for _ in range(2):
            layer.clear(layer.plan_clear(damaged=True))
        assert not layer.plan_clear(damaged=True).entries

    def test_disable_then_enable_restores(self, tmp_path: Path) -> None:
        """The variables of the switch turn the layer off and on again."""
        layer = self.seeded(tmp_path, Ability.DISABLE)
        was = layer.state().condition
        off, on = layer.disable(), layer.enable()
        assert off.layer == on.layer == layer.name
        assert off.set.keys() <= on.set.keys() | on.unset
        disabled = layer.environment.with_variables(off.set, off.unset)
        assert off.patches or self.make(disabled).state().condition is Condition.DISABLED
        assert self.make(disabled.with_variables(on.set, on.unset)).state().condition is was

    def test_relocation_moves_every_user_root(self, tmp_path: Path) -> None:
        """With the variables of a relocation, the root to write to is below the given folder."""
        layer, folder = self.seeded(tmp_path, Ability.RELOCATE), tmp_path / "elsewhere"
        switch = layer.relocate(folder)
        moved = self.make(layer.environment.with_variables(switch.set, switch.unset))
        assert folder in moved.roots()[0].path.parents
        assert list(moved.entries()) == []


def can(layer: Layer, ability: Ability) -> bool:
    """Return whether a layer has an ability here."""
    return layer.abilities()[ability] is None


def nobody(folder: Path) -> Path:
    """Make a substitute for ``/proc`` that shows no running program."""
    (folder / "self" / "fd").mkdir(parents=True, exist_ok=True)
    (folder / "self" / "maps").touch()
    if os.name == "posix" and not (namespace := folder / "self" / "ns" / "pid").is_symlink():
        namespace.parent.mkdir(exist_ok=True)
        namespace.symlink_to("pid:[4026531836]")
    return folder


def snapshot(folder: Path, *, times: bool = False) -> dict[str, str]:
    """Describe everything below a folder: its kind, the hash of its content, and optionally its modification time."""
    described: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            what = f"link to {os.readlink(path)}"
        elif path.is_dir():
            what = "folder"
        else:
            what = hashlib.sha256(path.read_bytes()).hexdigest()
        described[str(path.relative_to(folder))] = f"{what} {path.lstat().st_mtime_ns}" if times else what
    return described


def _artifacts(layer: Layer) -> dict[str, Artifact | None]:
    is_able = can(layer, Ability.GET)
    return {entry.key: layer.get(entry.key) if is_able else None for entry in layer.entries()}


def _look(layer: Layer) -> None:
    for root in layer.roots():
        list(layer.store.scan(root))
        layer.store.usage(root)
        list(layer.store.verify(root))


def _files(layer: Layer) -> list[Path]:
    return sorted(path for root in layer.roots() for path in root.path.rglob("*") if path.is_file())
