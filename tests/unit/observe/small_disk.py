"""Disks that fill up, really: the kernel refuses what does not fit."""

import resource
from contextlib import contextmanager


@contextmanager
def files_no_larger_than(limit_bytes):
    """As on a full disk: of a write that is too large a part is written, and the rest refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
