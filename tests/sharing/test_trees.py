"""Layers of images: the same files give the same bytes, and a layer may hold a difference only."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import amount

from cachectl.sharing.oci.tree import ForeignLayer, Tree, apply_layer, read_tree, write_layer

NAMES = st.sampled_from(["a", "b", "c"])
#: The content of each file, by its path of up to three names.
CONTENTS = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=9), max_size=6)


def make(folder: Path, contents: dict[str, bytes]) -> Tree:
    """Make a tree; a path that needs a file for a folder is left out."""
    folder.mkdir()
    for path, content in contents.items():
        try:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            continue
    return read_tree(folder)


@given(one=CONTENTS, other=CONTENTS)
@settings(max_examples=amount(20, 200))
def test_a_difference_makes_one_tree_of_another(
    one: dict[str, bytes], other: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("trees")
    below, tree = make(folder / "one", one), make(folder / "other", other)
    found = dict[str, str]()
    for root, content, under in ((folder / "one", below, {}), (folder / "other", tree, below)):
        file = io.BytesIO()
        write_layer(file, root, content, under)
        file.seek(0)
        apply_layer(file, found, 1 << 20)
    assert found == tree


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    written = []
    for name, paths in (("one", ("b/x", "a")), ("two", ("a", "b/x"))):
        tree = make(tmp_path / name, {path: path.encode() for path in paths})
        os.chmod(tmp_path / name / "a", 0o600 if name == "one" else 0o755)
        os.utime(tmp_path / name / "a", (len(name), len(name) * 7))
        file = io.BytesIO()
        written.append(write_layer(file, tmp_path / name, tree, {}))
    assert written[0] == written[1]
    file.seek(0)
    with tarfile.open(fileobj=file) as tar:
        members = tar.getmembers()
    assert [(one.name, one.mode, one.mtime, one.uid, one.uname) for one in members] == [
        ("a", 0o644, 0, 0, ""),
        ("b", 0o755, 0, 0, ""),
        ("b/x", 0o644, 0, 0, ""),
    ]


def layer_of(member: tarfile.TarInfo, content: bytes = b"") -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    file.seek(0)
    return file


def test_layers_by_others_are_not_built_upon() -> None:
    link, setuid, large = tarfile.TarInfo("a"), tarfile.TarInfo("b"), tarfile.TarInfo("c")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    setuid.mode = 0o4755
    layers = (layer_of(link), layer_of(setuid), layer_of(large, bytes(1 << 17)), io.BytesIO(b"no layer"), io.BytesIO())
    for layer in layers:
        with pytest.raises(ForeignLayer):
            apply_layer(layer, {}, 1 << 16)


def test_links_and_pipes_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/etc")
    os.mkfifo(tmp_path / "pipe")
    assert read_tree(tmp_path).keys() == {"file", "folder"}
