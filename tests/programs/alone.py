"""cachectl on a machine that runs nothing else: workers of the tests are in a namespace, where holders are unknown."""

import os
import sys
from pathlib import Path

from cachectl.cli.main import main
from cachectl.layers.core.conformance import nobody
from cachectl.layers.host.here import this_environment

processes = nobody(Path(os.environ["HOME"]).parent / "processes")
sys.exit(main(tuple(sys.argv[1:]), environment=this_environment()._replace(processes=processes)))
