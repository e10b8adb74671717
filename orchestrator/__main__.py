"""``python -m cachectl``."""

import sys

from cachectl.cli import main

sys.exit(main())
