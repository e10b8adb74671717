"""Entries of every layer in the account's home, which no test may change: ``canaries.py plant FILE``, ``check FILE``.

``plant`` fills the default places of every layer in the home of the password file, whatever ``HOME`` says, and MIOpen's
in the temporary folder; what is there stays as it is. It writes the state of all these places into FILE. ``check``
compares them with it, removes what was planted, and fails if anything has changed.
"""

import json
import os
import pwd
import shutil
import sys
import tempfile
from pathlib import Path

from support.hostile import hash_tree
from support.products import PRODUCTS

#: A database in MIOpen's old fallback, the temporary folder itself.
_FALLBACK = "gfx90a6e.ukdb"


def places() -> tuple[Path, Path]:
    """Return the account's home, and the temporary folder that programs use without a variable."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir), Path("/tmp")  # noqa: S108 - what MIOpen uses


def filled(folder: Path) -> list[tuple[Path, Path]]:
    """Fill a folder like a home with entries of every layer; return pairs of each file and where it is planted."""
    for name, product in PRODUCTS.items():
        if "system" not in name:
            product.fill(folder / name)
    home, temporary = places()
    pairs = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        pairs.append((file, home / Path(*file.relative_to(folder).parts[1:])))
        if file.name == _FALLBACK:
            pairs.append((file, temporary / file.name))
            pairs.append((file, temporary / ".cache/miopen/3.3.0.a85ca8a54" / file.name))
    return pairs


def watched(targets: list[Path]) -> dict[str, str]:
    """Describe every file below the places of the targets: their folders in the home, and themselves elsewhere."""
    home, _ = places()
    tops = {home.joinpath(*path.relative_to(home).parts[:2]) for path in targets if path.is_relative_to(home)}
    tops |= {path for path in targets if not path.is_relative_to(home)}
    return {os.fsdecode(path): said for path, said in hash_tree(*(top for top in tops if top.exists())).items()}


def plant(file: Path) -> int:
    """Plant what is not there, and write the state; return 0."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = filled(Path(folder))
        planted, made = [], []
        for source, target in pairs:
            if not os.path.lexists(target):
                made += [str(above) for above in target.parents if not above.exists()]
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
                planted.append(str(target))
        state = watched([target for _, target in pairs])
    document = {"planted": planted, "made": made, "targets": [str(target) for _, target in pairs], "state": state}
    file.write_text(json.dumps(document))
    return 0


def check(file: Path) -> int:
    """Say what has changed, remove what was planted, and return 1 if anything has changed."""
    document = json.loads(file.read_text())
    before, after = document["state"], watched([Path(target) for target in document["targets"]])
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    for path in changed:
        sys.stdout.write(f"changed: {path}\n")
    for path in document["planted"]:
        Path(path).unlink(missing_ok=True)
    for path in sorted(document["made"], key=len, reverse=True):
        if os.path.isdir(path) and not os.listdir(path):
            os.rmdir(path)
    sys.stdout.write(f"{len(before):,} files and folders of {len(document['planted']):,} canaries compared\n")
    return bool(changed)


if __name__ == "__main__":
    name = Path(sys.argv[2])
    raise SystemExit(check(name) if sys.argv[1] == "check" else plant(name))
