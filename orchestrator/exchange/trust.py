"""Why a store is trusted: OpenSSH signatures, made and verified by ``ssh-keygen -Y``, a digest, or the user's word.

The list of signers has the format of ALLOWED SIGNERS in ssh-keygen(1), so git's list can be used. Signatures are in the
namespace ``cachectl-store``: a signature of an email or a commit is not accepted.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from cachectl.exchange.place import BadStore
from cachectl.layers.base.environment import Environment
from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.layers.base.text import printable
from cachectl.layers.disk.temporaries import temporary_folder

NAMESPACE = "cachectl-store"
_COMMAND = "ssh-keygen"
UNTRUSTED = "stores contain executable code; pass --allowed-signers FILE, --digest HEX or --trust"


class Untrusted(CachectlError):
    """Nothing shows that this can be trusted."""


class OtherDigest(Untrusted):
    """A store does not have the given digest."""


@dataclass(frozen=True, slots=True)
class Trust:
    """The reason to trust a store: exactly one of three.

    :param allowed_signers: a file of signers, in the format of ssh-keygen(1)
    :param digest: the SHA-256 of a bundle's file, or of the index of another store
    :param trust: the user's word
    :raises BadRequest: for no reason or several, and for an invalid digest
    """

    allowed_signers: str | None = None
    digest: str | None = None
    trust: bool = False

    def __post_init__(self) -> None:
        if (self.allowed_signers is not None) + (self.digest is not None) + self.trust != 1:
            raise BadRequest(UNTRUSTED)
        if self.digest is not None and not re.fullmatch("[0-9a-fA-F]{64}", self.digest):
            raise BadRequest(f"{printable(self.digest)[:80]!r} is not a SHA-256 of 64 hexadecimal digits")


def sign(text: bytes, key: str) -> bytes:
    """Return the signature of a text by a private key, or by a public key whose private key an agent holds.

    Raises :class:`BadRequest` if the key cannot sign.
    """
    return _with_key("sign with", key, ("-Y", "sign", "-f", key, "-n", NAMESPACE), text)


def _with_key(what: str, key: str, arguments: tuple[str, ...], text: bytes) -> bytes:
    """Return the output of ssh-keygen for a key. Raises :class:`BadRequest`."""
    shown = printable(key)
    # If there is only the public key, an agent may hold the private one.
    if not os.path.lexists(key) and not os.path.lexists(f"{key}.pub"):
        raise BadRequest(f"{shown}: this key does not exist; ssh-keygen -t ed25519 -f {quote(key)} makes one")
    outcome = _run(arguments, text)
    if outcome.returncode or not outcome.stdout:
        lines = outcome.stderr.decode(errors="replace").split("\n")
        reason = next((line.strip() for line in reversed(lines) if line.strip()), "ssh-keygen gave no reason")
        raise BadRequest(f"cannot {what} {shown}: {printable(reason)}")
    return outcome.stdout


def signer(environment: Environment, allowed: str, text: bytes, signature: bytes) -> str:
    """Return which signer in a list has signed a text.

    If a line of the list names its signers by a pattern, that is returned: the signature does not show more. A negated
    pattern (``!eve@x``) names nobody. Raises :class:`Untrusted` if no allowed signer has signed, and :class:`BadStore`
    for a signature of other content.
    """
    if not signature:
        raise Untrusted("not signed")
    with temporary_folder(environment) as folder:
        file = str(folder / "signature")
        Path(file).write_bytes(signature)
        principals = _run(("-Y", "find-principals", "-s", file, "-f", allowed), text)
        names = principals.stdout.decode(errors="replace").replace(",", "\n").split("\n")
        # Names before patterns.
        for name in sorted(filter(None, map(str.strip, names)), key=lambda name: "*" in name or "?" in name):
            verify = ("-Y", "verify", "-f", allowed, "-I", name, "-n", NAMESPACE, "-s", file)
            if not name.startswith("!") and _run(verify, text).returncode == 0:
                return name
        if _run(("-Y", "check-novalidate", "-n", NAMESPACE, "-s", file), text).returncode:
            raise BadStore("its signature is for other content, so it was changed")
    raise Untrusted(f"signed by nobody in {printable(allowed)}")


@contextmanager
def allowed_list(environment: Environment, key: str | None, allowed: str | None) -> Iterator[str | None]:
    """Yield a list of signers, to which the owner of a key is added; ``None`` without both."""
    if allowed is not None and not Path(allowed).is_file():
        raise Untrusted(f"{printable(allowed)}: this list of allowed signers does not exist")
    if key is None:
        yield allowed
        return
    signers = b"" if allowed is None else Path(allowed).read_bytes()
    try:
        public = Path(key if key.endswith(".pub") else f"{key}.pub").read_bytes()
    except OSError:
        public = _with_key("read the public key of", key, ("-y", "-f", key), b"")
    with temporary_folder(environment) as folder:
        both = folder / "signers"
        # First, because ssh-keygen stops at the first line with the key. Without the comment after the key.
        both.write_bytes(b"me %s\n%s\n" % (b" ".join(public.split(maxsplit=2)[:2]), signers))
        yield str(both)


def _run(arguments: tuple[str, ...], text: bytes) -> subprocess.CompletedProcess[bytes]:
    try:
        outcome = subprocess.run((_COMMAND, *arguments), input=text, capture_output=True, check=False)  # noqa: S603
    except FileNotFoundError as error:
        raise CachectlError("signatures need ssh-keygen; install the OpenSSH client") from error
    # In a container whose user has no account, it refuses everything, which says nothing about the signature.
    if outcome.stderr.startswith(b"No user exists"):
        said = printable(outcome.stderr.decode(errors="replace").strip())
        raise CachectlError(f"signatures need an account ({said}): add one to /etc/passwd, or pull with --digest")
    return outcome
