"""Regular expressions that are compiled on first use, since each run defines many more than it uses."""

from __future__ import annotations

import re

# Importing typing would take longer than all else that --version needs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from re import compile as regex

    __all__ = ["regex"]
else:

    class regex:  # noqa: N801 - it replaces a function
        """A pattern that is compiled when one of its methods is first looked up."""

        def __init__(self, text, flags=0) -> None:  # noqa: ANN001 - a type checker sees the standard library's
            self.pattern = text
            self.flags = flags

        def __getattr__(self, name):  # noqa: ANN001, ANN204 - whatever a pattern has
            if name.startswith("__"):
                raise AttributeError(name)
            value = getattr(re.compile(self.pattern, self.flags), name)
            setattr(self, name, value)
            return value
