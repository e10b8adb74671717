"""Record in ``tests/data/platformdirs.json`` what releases of platformdirs answer in odd environments.

Each release is fetched by pip. Run it without arguments, on Linux, with network.
"""

import importlib
import json
import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

TABLE = Path(__file__).parents[1] / "data" / "platformdirs.json"
# Both sides of each change of the rule.
RELEASES = ("2.2.0", "4.6.0", "4.11.7", "4.11.8", "4.11.15", "4.12.4", "4.14.7")
CLASSES = {"linux": ("unix", "Unix"), "darwin": ("macos", "MacOS"), "win32": ("windows", "Windows")}
HOMES = (None, "", "relative/home", "/h")
VALUES = (None, "", " ", "relative/cache", "~/cache", "/moved")
OVERRIDE = "WIN_PD_OVERRIDE_LOCAL_APPDATA"
CASES = [
    *(("linux", {"HOME": home, "XDG_CACHE_HOME": value}) for home in HOMES for value in VALUES),
    *(("darwin", {"HOME": home}) for home in HOMES),
    *(("win32", {"LOCALAPPDATA": "C:/L", OVERRIDE: value}) for value in (None, "relative", "D:/O")),
]


def ask(platform, variables):
    """Return the answer of the platformdirs that this process imports."""
    module, name = CLASSES[platform]
    library = importlib.import_module(f"platformdirs.{module}")
    if platform == "win32":
        # Of the ways to ask Windows, other systems have this one.
        library._resolve_win_folder = library._RESOLVE_WIN_FOLDER = library.get_win_folder_from_env_vars
    os.environ.clear()
    os.environ.update({variable: value for variable, value in variables.items() if value is not None})
    return getattr(library, name)("app", "app").user_cache_dir


def answers(release):
    """Return what a release answers to each case."""
    with tempfile.TemporaryDirectory() as folder:
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder)
        subprocess.run([*pip, f"platformdirs=={release}"], check=True)
        command = [sys.executable, __file__, "ask"]
        asked = subprocess.run(command, check=True, capture_output=True, text=True, env={"PYTHONPATH": folder})
    return json.loads(asked.stdout.replace(pwd.getpwuid(os.getuid()).pw_dir, "/account"))


def main():
    """Write the table, a case a line."""
    recorded = {release: answers(release) for release in RELEASES}
    lines = [
        json.dumps([*case, {release: recorded[release][number] for release in RELEASES}])
        for number, case in enumerate(CASES)
    ]
    TABLE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.stdout.write(json.dumps([ask(*case) for case in CASES]))
    else:
        main()
