"""OpenSSH signatures: made and verified by ``ssh-keygen -Y``.

The list of signers has the format of ALLOWED SIGNERS in ssh-keygen(1), so git's own list can be used. Signatures are
for the namespace ``cachectl-bundle`` alone: a signature of a mail or a commit is not accepted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from shlex import quote
from typing import BinaryIO, Final

from cachectl.layers.base.errors import BadRequest, CachectlError
from cachectl.layers.base.texts import printable

NAMESPACE: Final = "cachectl-bundle"
_COMMAND: Final = ("ssh-keygen", "-Y")
_PIPE: Final = subprocess.PIPE
_CHUNK: Final = 1 << 20


class Untrusted(CachectlError):
    """Nothing shows that a file can be trusted."""


def _demand_key(key: str) -> None:
    # With the public half alone, an agent may hold the other.
    if not os.path.lexists(key) and not os.path.lexists(f"{key}.pub"):
        message = f"{printable(key)}: this key does not exist; ssh-keygen -t ed25519 -f {quote(key)} makes one"
        raise BadRequest(message)


def sign(file: BinaryIO, key: str, namespace: str = NAMESPACE) -> bytes:
    """Return the signature of an open file by a private key, or by a public key whose private one an agent holds.

    Raises :class:`BadRequest` if the key cannot sign.
    """
    _demand_key(key)
    done = _run(("sign", "-f", key, "-n", namespace), file)
    if done.returncode or not done.stdout:
        message = f"cannot sign with {printable(key)}: {_complaint(done)}"
        raise BadRequest(message)
    return done.stdout


def signer(file: BinaryIO, signature: str, allowed: str, namespace: str = NAMESPACE) -> str:
    """Return the allowed signer who has signed an open file.

    A line of the list may name its signers by patterns. A signature does not show which signer it is from, so the
    pattern is returned with the key. A negated pattern (``!eve@x``) names nobody. Raises :class:`Untrusted` if no
    allowed signer has signed, or there is no signature.
    """
    if not os.path.isfile(allowed):
        message = f"{printable(allowed)}: this list of allowed signers does not exist"
        raise Untrusted(message)
    if not os.path.isfile(signature):
        message = f"not signed: {printable(signature)} does not exist; get it from the sender, or give --sha256"
        raise Untrusted(message)
    found = _run(("find-principals", "-s", signature, "-f", allowed), file)
    names = found.stdout.decode(errors="replace").replace(",", "\n").split("\n")
    named = [name for name in dict.fromkeys(map(str.strip, names)) if name and not name.startswith("!")]
    for name in sorted(named, key=_is_pattern):
        done = _run(("verify", "-f", allowed, "-I", name, "-n", namespace, "-s", signature), file)
        if done.returncode == 0:
            return f"{name} ({_key_of(done)})" if _is_pattern(name) else name
        found = done
    reason = _complaint(found)
    if not is_signature(file, signature, namespace):
        reason = "the signature is damaged or of other content; sign again, as by cachectl export --sign KEY"
    message = f"not signed by a signer of {printable(allowed)}: {reason}"
    raise Untrusted(message)


def is_signature(file: BinaryIO, signature: str, namespace: str) -> bool:
    """Return whether a file is a whole signature of an open file by any key, also one that nobody allowed."""
    return _run(("check-novalidate", "-n", namespace, "-s", signature), file).returncode == 0


def public_key(key: str) -> str:
    """Return the public key of a key that :func:`sign` takes. Raises :class:`BadRequest` if it cannot be read."""
    for path in (key, f"{key}.pub"):
        with suppress(OSError, UnicodeError):
            if path.endswith(".pub"):
                return " ".join(open(path, encoding="utf-8").readline().split()[:2])
    _demand_key(key)
    command = (_COMMAND[0], "-y", "-f", key)
    done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)  # noqa: S603
    if done.returncode:
        message = f"cannot read the public key of {printable(key)}: {_complaint(done)}"
        raise BadRequest(message)
    return " ".join(done.stdout.decode().split()[:2])


def _is_pattern(principal: str) -> bool:
    return "*" in principal or "?" in principal


def _key_of(verified: subprocess.CompletedProcess[bytes]) -> str:
    """Return the key in the output of ``ssh-keygen -Y verify``: *Good … signature … with ED25519 key SHA256:…*."""
    lines = verified.stdout.decode(errors="replace").splitlines()
    return printable(lines[0].rpartition(" with ")[2]) if lines else "a key of that line"


def _run(arguments: tuple[str, ...], file: BinaryIO) -> subprocess.CompletedProcess[bytes]:
    command = (*_COMMAND, *arguments)
    try:
        with subprocess.Popen(command, stdin=_PIPE, stdout=_PIPE, stderr=_PIPE) as process:  # noqa: S603
            # Through a pipe: a child that inherits the file would miss the bytes buffered here.
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
