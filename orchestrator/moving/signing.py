"""Signatures of OpenSSH, made and held against a list of signers by ``ssh-keygen -Y``.

The list has the format of ALLOWED SIGNERS in ssh-keygen(1), so that git's own may be used; a signature counts for the
namespace ``cachectl-bundle`` alone, and one that was made for mail or a commit does not pass for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from typing import BinaryIO, Final

from cachectl.layers.base.errors import BadRequest, CachectlError, printable

NAMESPACE: Final = "cachectl-bundle"
_COMMAND: Final = ("ssh-keygen", "-Y")
_PIPE: Final = subprocess.PIPE
_CHUNK: Final = 1 << 20


class Untrusted(CachectlError):
    """Nothing vouches for what a file holds."""


def sign(file: BinaryIO, key: str) -> bytes:
    """Return the signature of an open file by a private key, or by a public one whose private one the agent holds.

    Raises :class:`BadRequest` where the key cannot sign.
    """
    done = _run(("sign", "-f", key, "-n", NAMESPACE), file)
    if done.returncode or not done.stdout:
        message = f"cannot sign with {printable(key)}: {_complaint(done)}"
        raise BadRequest(message)
    return done.stdout


def signer(file: BinaryIO, signature: str, allowed: str) -> str:
    """Return who has signed an open file, among the allowed signers.

    A line of the list may name its signers by patterns. A signature does not say which of them it was: the pattern is
    returned, with the key that signed. A negated pattern (``!eve@x``) names nobody. Raises :class:`Untrusted` where
    none of them has signed, or there is no signature.
    """
    if not os.path.isfile(allowed):
        message = f"{printable(allowed)}: no such list of allowed signers"
        raise Untrusted(message)
    if not os.path.isfile(signature):
        message = f"not signed: {printable(signature)} does not exist; get it from the sender, or give --sha256"
        raise Untrusted(message)
    found = _run(("find-principals", "-s", signature, "-f", allowed), file)
    names = found.stdout.decode(errors="replace").replace(",", "\n").split("\n")
    named = [name for name in dict.fromkeys(map(str.strip, names)) if name and not name.startswith("!")]
    for name in sorted(named, key=_is_pattern):
        done = _run(("verify", "-f", allowed, "-I", name, "-n", NAMESPACE, "-s", signature), file)
        if done.returncode == 0:
            return f"{name} ({_key_of(done)})" if _is_pattern(name) else name
        found = done
    message = f"not signed by a signer of {printable(allowed)}: {_complaint(found)}"
    raise Untrusted(message)


def _is_pattern(principal: str) -> bool:
    return "*" in principal or "?" in principal


def _key_of(verified: subprocess.CompletedProcess[bytes]) -> str:
    """Return the key that ``ssh-keygen -Y verify`` names: *Good "…" signature for … with ED25519 key SHA256:…*."""
    lines = verified.stdout.decode(errors="replace").splitlines()
    return printable(lines[0].rpartition(" with ")[2]) if lines else "a key of that line"


def _run(arguments: tuple[str, ...], file: BinaryIO) -> subprocess.CompletedProcess[bytes]:
    command = (*_COMMAND, *arguments)
    try:
        with subprocess.Popen(command, stdin=_PIPE, stdout=_PIPE, stderr=_PIPE) as process:  # noqa: S603
            # Through a pipe: what the file has buffered here, a child that inherits it would not read.
            file.seek(0)
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    shutil.copyfileobj(file, process.stdin, _CHUNK)
            out, complaint = process.communicate()
    except FileNotFoundError as error:
        message = "signatures need ssh-keygen of OpenSSH; install its client"
        raise CachectlError(message) from error
    return subprocess.CompletedProcess(command, process.returncode, out, complaint)


def _complaint(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return printable(lines[-1].strip()) if lines else "ssh-keygen gave no reason"
