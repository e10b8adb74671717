"""MIOpen's databases exported for installation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.miopen_files import (
    ARGS,
    CODE,
    RAW,
    packed,
    store,
    stored,
    user_file,
)

if TYPE_CHECKING:
    from homes import Home


# ---------------------------------------------------------------------- the command


def test_the_command_exports_files(home: Home) -> None:
    store(user_file(home.path), {"a.cl.o": packed(CODE), "b.cl.o": packed(CODE)})
    document = home.json("export", "--as-kdb", "db", "miopen", "--kernel", "a")
    assert document["schema"] == "cachectl/miopen-export/1"
    assert [(file["file"], file["entries"]) for file in document["files"]] == [
        (str(home.path / "db" / "gfx90a6e.kdb"), 1)
    ]
    assert "gfx90a6e.kdb" in home.cachectl("export", "--as-kdb", "db", "--force").stdout
    assert len(stored(home.path / "db" / "gfx90a6e.kdb")) == 2
    for wrong in (("--as-kdb", "db", "pocl"), ("--as-kdb", "db/x.kdb"), ("--as-kdb", "a", "--sign", "k"), ()):
        done = home.cachectl("export", *wrong, check=False)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1


def test_the_command_merges(home: Home) -> None:
    into = store(user_file(home.path), {"a.cl.o": packed(CODE)})
    source = store(home.path / "rank" / "gfx90a6e.ukdb", {"a.cl.o": packed(RAW), "b.cl.o": packed(CODE)})
    done = home.cachectl("miopen", "merge", str(source), str(into), check=False)
    assert done.returncode == 1
    assert f"a.cl.o::{ARGS}" in done.stderr
    document = home.json("miopen", "merge", str(source), str(into), check=False)
    assert document["total"] == {"added": 0, "there": 1, "conflicts": 1, "failed": 0}
    assert home.cachectl("miopen", "merge", str(source), str(home.path / "x.ukdb"), check=False).returncode == 2
