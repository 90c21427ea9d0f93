"""The user's key: which checkpoints were written by this user on this machine.

Opening a pickle can run any code. A checkpoint that holds pickles is therefore signed (HMAC-SHA256)
with a random key from the user's own data directory, and its pickles are opened only if the
signature is right or the caller trusts the file. The key is made when it is first needed, is
readable for its user only (mode 0600), and never leaves the machine.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from envfleet.errors import EnvfleetError

__all__ = ["SIGNATURE_BYTES", "NoKey", "is_signed", "key_path", "sign", "user_key"]

KEY_BYTES = SIGNATURE_BYTES = 32


class NoKey(EnvfleetError, OSError):
    """The user has no key here, and none can be made."""


def key_path() -> Path:
    """Where the user's key lies: ``$XDG_DATA_HOME/envfleet/key`` or ``~/.local/share/...``."""
    home = os.environ.get("XDG_DATA_HOME", "")
    # the standard says that a relative path is to be ignored
    folder = Path(home) if os.path.isabs(home) else Path("~/.local/share").expanduser()
    return folder / "envfleet" / "key"


def user_key() -> bytes:
    """The user's key, which is made if there is none.

    Raises:
        NoKey: It cannot be read or made, or others can read it.
    """
    try:
        path = key_path()
        if not path.exists():
            _make_key(path)
        return _read_key(path)
    except (OSError, RuntimeError) as exc:  # the latter: there is no home directory
        if isinstance(exc, NoKey):
            raise
        raise NoKey(f"{getattr(exc, 'filename', None) or 'the home directory'}: {exc}") from exc


def sign(key: bytes, content: bytes) -> bytes:
    """The signature of these bytes."""
    return hmac.digest(key, content, "sha256")


def is_signed(key: bytes, content: bytes, signature: bytes) -> bool:
    """Whether this key signed these bytes."""
    return hmac.compare_digest(sign(key, content), signature)


def _make_key(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was first: its key is the user's
            os.link(unfinished, path)
    finally:
        unfinished.unlink()


def _read_key(path: Path) -> bytes:
    with path.open("rb") as file:
        about, key = os.fstat(file.fileno()), file.read(KEY_BYTES + 1)
    if hasattr(os, "geteuid"):
        if about.st_uid != os.geteuid():
            raise NoKey(f"{path} belongs to another user")
        if stat.S_IMODE(about.st_mode) & 0o077:
            raise NoKey(f"{path} can be read by other users; remove it, and a new one is made")
    if len(key) != KEY_BYTES:
        raise NoKey(f"{path} is damaged; remove it, and a new one is made")
    return key
