"""In a real Jupyter kernel: what report, plan and trace look like, and the magics of cells."""

import sys
from importlib import import_module
from typing import Any

import pytest
from homes import Home
from tiers import absent, real

BUILD = """
import sys
sys.path.insert(0, {programs!r})
import binaries, pyopencl as cl
context, queue = binaries.started()
program = cl.Program(context, "__kernel void nb(__global int *a) {{ a[0] = 1; }}").build(cache_dir=False)
binaries.number_from(queue, program, "nb")
"""


def cells(home: Home, *sources: str) -> list[list[dict[str, Any]]]:
    """Run the cells of a notebook in a home; return the outputs of each."""
    try:
        nbclient, v4, managers = map(import_module, ("nbclient", "nbformat.v4", "jupyter_client.manager"))
    except ImportError:
        absent("needs a Jupyter kernel: pip install nbclient ipykernel")
    notebook = v4.new_notebook(cells=[v4.new_code_cell(source) for source in sources])
    manager = managers.KernelManager()
    manager.kernel_spec.argv = [sys.executable, *manager.kernel_spec.argv[1:]]
    client = nbclient.NotebookClient(notebook, km=manager, timeout=120, allow_errors=True)
    try:
        client.execute(cwd=str(home.path), env=dict(home.variables))
    finally:
        # The client leaves a kernel that was given to it alone.
        manager.shutdown_kernel(now=True)
    return [cell["outputs"] for cell in notebook.cells]


@real
@pytest.mark.environment
def test_facts_and_magics_in_a_notebook(home: Home) -> None:
    build = BUILD.format(programs=str(home.programs))
    report, _, _, cold, first, second, plan, isolated = cells(
        home,
        "import cachectl\nstack = cachectl.Stack()\nstack.report()",
        "%load_ext cachectl",
        build,
        f"%%disabled\n{build}\nprint('built')",
        f"%%traced\n{build.replace('nb', 'other')}",
        f"%%traced\n{build}",
        "stack.plan_clear(layers=['pocl'])",
        "%%isolated\n1",
    )
    (shown,) = [output["data"]["text/html"] for output in report]
    assert "<div>0 B in 0 entries</div>" in shown
    assert [output["text"] for output in cold if output["output_type"] == "stream"] == ["built\n"]
    for outputs, verdict in ((first, "compiling `other`"), (second, "Warm: every lookup hit")):
        (shown,) = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
        assert verdict in shown
        assert "<iframe srcdoc=" in shown
    (shown,) = [output["data"]["text/html"] for output in plan]
    assert "<th>would go</th>" in shown
    # PoCL has started: one line says so.
    (said,) = [output["text"] for output in isolated if output.get("name") == "stdout"]
    assert (said.startswith("cachectl: "), said.count("\n")) == (True, 1)
