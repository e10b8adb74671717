"""The layer ``toyc``: compiled kernels, one file each, in a flat folder."""

import re
from pathlib import Path

from cachectl.layers import core
from cachectl.layers.formats.details import Details
from cachectl.layers.stores.files import Files

HEAD = re.compile(rb"TOYC (\w+)\n")


class ToycCodec(core.Codec):
    """The word TOYC, the kernel's name, and its code."""

    form = "toyc-kernel/1"

    def describe(self, data: bytes) -> Details:
        head = HEAD.match(data)
        return Details(kernels=(head[1].decode(),) if head else None)

    def check(self, data: bytes) -> core.Damage | None:
        return None if HEAD.match(data) else core.Damage(core.Severity.FAILS, "has no toyc header")


class Toyc(core.Layer):
    name, title = "toyc", "toyc kernels"
    places = core.Places("TOYC_CACHE_DIR", default=core.user_cache("toyc"))
    switch = core.EnvSwitch("TOYC_CACHE", off="0", read=core.at_load("libtoyc.so"))
    store = Files(r"[0-9a-f]{16}\.toyc", codec=ToycCodec())
    about = core.About(
        reveals="names of your kernels",
        portability=core.Portability(),
        lookups=core.Lookups("toyc", {"toyc": Path(__file__).with_name("toyc_watcher.py")}, ("toyc",)),
    )
