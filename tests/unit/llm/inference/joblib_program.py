"""Workers of joblib ask one manager and hand their turns over; prints what came of it as JSON."""

import json
import os
import sys

import joblib

from envfleet.llm import SharedLLMInferenceManager
from envfleet.llm.inference.scripted import ScriptedEngine
from tests.unit.llm.inference.stage import ask


def play(client, names):
    """What a worker does: ask, hand the answer over, and give back a receipt."""
    for name in names:
        answer = client.generate(ask(name, seed=name))
        assert client.send("turn", (name, answer.text, os.getpid())) == name
    client.close()
    return len(names)


def main(backend):
    turns, pids = {}, set()

    def on_turn(payload):
        name, turns[name], pid = payload
        pids.add(pid)
        return name

    with SharedLLMInferenceManager(ScriptedEngine()) as llm:
        llm.on_message("turn", on_turn)
        calls = [joblib.delayed(play)(llm.client(), range(s, s + 10)) for s in range(0, 40, 10)]
        with joblib.parallel_config(backend=backend):
            receipts = joblib.Parallel(n_jobs=2)(calls)
        expected = {name: llm.generate(ask(name, seed=name)).text for name in range(40)}
    found = {
        "receipts": receipts,
        "pids": sorted(pids),
        "pid": os.getpid(),
        "is_equal": turns == expected,
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
