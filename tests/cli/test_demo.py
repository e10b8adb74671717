"""``cachectl demo``: on a PoCL that compiles, and where none does."""

from homes import Home, wheel, working_pocl
from tiers import real, thorough_only


@real
@thorough_only
def test_the_demo_runs_on_the_first_pocl_that_compiles(home: Home) -> None:
    said = home.cachectl("demo").stdout
    assert "after purge --all: cold again" in said
    own = wheel() / ".libs/pocl.icd"
    done = home.cachectl("demo", OCL_ICD_VENDORS=str(own), check=False)
    refused = "PoCL cannot compile for this processor (error: unknown target CPU"
    assert (done.returncode, refused in done.stderr) == ((0, False) if working_pocl() == str(own) else (1, True))


@real
def test_the_demo_without_pocl_names_the_extra(home: Home) -> None:
    home.refused("demo", says="pip install 'opencl-cachectl[demo]'", OCL_ICD_VENDORS="/dev/null")
