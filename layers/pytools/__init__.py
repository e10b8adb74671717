"""The layer ``pytools``, and the store of dictionaries that ``loopy`` and ``pyopencl-invoker`` share with it."""

from cachectl.layers.pytools.cache import PytoolsDictionaries as PytoolsDictionaries
from cachectl.layers.pytools.cache import relocate_user_cache as relocate_user_cache
from cachectl.layers.pytools.cache import user_cache_roots as user_cache_roots
from cachectl.layers.pytools.dictionaries import SCHEMA as SCHEMA
from cachectl.layers.pytools.dictionaries import Dictionaries as Dictionaries
from cachectl.layers.pytools.dictionaries import Staleness as Staleness
from cachectl.layers.pytools.dictionaries import staleness as staleness
