"""Regular expressions that are compiled at their first use.

Each start of the program defines many more than it uses. A type checker sees the pattern of the standard library.
"""

from __future__ import annotations

import re

# Importing typing would take longer than all else that --version needs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from re import compile as regex

    __all__ = ["regex"]
else:

    class regex:  # noqa: N801 - it stands for a function
        """A pattern that is compiled when a method of it is first asked for."""

        def __init__(self, text, flags=0) -> None:  # noqa: ANN001 - a type checker sees the standard library's
            self.pattern = text
            self.flags = flags

        def __getattr__(self, name):  # noqa: ANN001, ANN204 - whatever a pattern has
            if name.startswith("__"):
                raise AttributeError(name)
            value = getattr(re.compile(self.pattern, self.flags), name)
            setattr(self, name, value)
            return value
