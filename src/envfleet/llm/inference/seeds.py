"""Seeds of requests, so that a rollout draws the same tokens wherever and whenever it is played."""

from __future__ import annotations

import hashlib

_BITS = 31
"""What every server takes, those with signed 32-bit seeds too."""


def request_seed(run_seed: int, env_id: int, turn: int, attempt: int = 0) -> int:
    """The seed of one request: the same in every process, and different for every argument."""
    text = f"{run_seed} {env_id} {turn} {attempt}"
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"envfleet-request").digest()
    return int.from_bytes(digest, "big") >> (64 - _BITS)
