"""``python -m cachectl.cli.in_home``: the child of ``--user``, which has become the user, in the home of ``HOME``."""

from __future__ import annotations

import sys
from dataclasses import replace

from cachectl.cli.main import main
from cachectl.homes.child import NO_HOME
from cachectl.layers.base.environment import Environment

if __name__ == "__main__":
    here = Environment.here()
    # Some libraries go by the account instead of HOME; another home than the named one is none of ours.
    here = replace(here, home=here.home_folder)
    sys.exit(main(environment=here) if here.home.is_dir() else NO_HOME)
