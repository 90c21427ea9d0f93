"""The process of the embedded model: llama.cpp's server on a loopback port of its own.

It reads its settings as one line of JSON from its standard input, writes its address as one line to
its standard output, and lives until its input ends. The kernel ends it when its parent dies, in
whichever way.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the parent has had enough."""
    _end_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then closes us
    settings = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp prints must not be taken for our words
    server = _serve(settings)
    answers.write(json.dumps({"address": server.listening_address}) + "\n")
    answers.close()
    sys.stdin.read()
    os._exit(0)  # with nothing to save, and at once, though threads may be working


def _end_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)


def _serve(settings: dict[str, Any]) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.n_parallel = settings["max_concurrency"]
    params.n_ctx = settings["context_tokens"]
    params.kv_unified = True  # a long conversation may take the room of several short ones
    params.cont_batching = params.cache_prompt = True
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.api_keys = [settings["key"]]
    params.n_threads_http = settings["max_concurrency"] + 4  # one each, and some for short calls
    params.ui = False
    params.verbosity = 0
    return xllamacpp.Server(params)


if __name__ == "__main__":
    main()
