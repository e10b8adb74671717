"""Other Python environments than that of the tests."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path


def another_venv(path: Path) -> str:
    """Make a virtual environment with a PyOpenCL of its own, the rest being that of this one; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    site = next(path.glob("lib/python*/site-packages"))
    here = Path(str(importlib.util.find_spec("pyopencl").origin)).parents[1]  # type: ignore[union-attr]
    # PyOpenCL looks for PoCL beside itself.
    for folder in (here / "pyopencl", *here.glob("pyopencl-*.dist-info"), *here.glob("pocl*")):
        shutil.copytree(folder, site / folder.name)
    (site / "others.pth").write_text("\n".join(entry for entry in sys.path if entry.startswith("/")) + "\n")
    return f"{path}/bin/python"
