"""``python -m cachectl``."""

import sys

from cachectl.cli.main import main

sys.exit(main())
