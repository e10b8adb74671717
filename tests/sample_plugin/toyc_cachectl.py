"""The layer ``toyc``: compiled kernels, one file each, in a flat folder."""

import re

from cachectl.layers.base.declarations import EnvSwitch, Places, at_load, user_cache
from cachectl.layers.base.facts import Severity
from cachectl.layers.base.layer import Layer
from cachectl.layers.base.parts import About, Call, Lookups, Portability
from cachectl.layers.base.store import Codec, Damage
from cachectl.layers.formats.details import Details
from cachectl.layers.stores.files import Files

HEAD = re.compile(rb"TOYC (\w+)\n")


class ToycCodec(Codec):
    """The word TOYC, the kernel's name, and its code."""

    form = "toyc-kernel/1"

    def describe(self, data: bytes) -> Details:
        head = HEAD.match(data)
        return Details(kernels=(head[1].decode(),) if head else None)

    def check(self, data: bytes) -> Damage | None:
        return None if HEAD.match(data) else Damage(Severity.FAILS, "has no toyc header")


class Toyc(Layer):
    name, title = "toyc", "toyc kernels"
    places = Places("TOYC_CACHE_DIR", default=user_cache("toyc"))
    switch = EnvSwitch("TOYC_CACHE", off="0", read=at_load("libtoyc.so"))
    store = Files(r"[0-9a-f]{16}\.toyc", codec=ToycCodec())
    about = About(
        reveals="names of your kernels",
        portability=Portability(),
        lookups=Lookups("toyc", (Call("toyc", "find"), Call("toyc", "keep", stores=True))),
    )
