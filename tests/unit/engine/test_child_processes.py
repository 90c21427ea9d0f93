"""Who is found to have been started by a process, and who of them is ended."""

import subprocess
import sys

import pytest

from envfleet.engine.backends.process.child_processes import end, hold_offspring
from tests.faults.stage import is_alive, left_after
from tests.gates import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's lists")

PARENT = """
import subprocess, sys, threading, time

SLEEPER = "import time; time.sleep(3600)"
CHILD = f"import subprocess as s, sys; c = s.Popen(['sleep', '3600']); print(c.pid); c.wait()"
child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
grandchild = int(child.stdout.readline())
keeps = subprocess.Popen([sys.executable, "-c", SLEEPER, "resource_tracker"])
others = []
thread = threading.Thread(
    target=lambda: (others.append(subprocess.Popen(["sleep", "3600"])), time.sleep(3600))
)
thread.start()
while not others:
    time.sleep(0.01)
print(child.pid, grandchild, others[0].pid, keeps.pid, flush=True)
"""


def test_all_are_ended_but_those_who_clean_up():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        *theirs, keeps = map(int, parent.stdout.readline().split())
        assert hold_and_end(keeps) == 0
        assert hold_and_end(parent.pid) == len(theirs)
        assert not left_after(theirs, PATIENCE_S)
        assert is_alive(keeps)
        assert is_alive(parent.pid)
    finally:
        subprocess.run(["kill", "-9", str(keeps), str(parent.pid)], check=True)
        parent.communicate()
    assert not left_after([keeps], PATIENCE_S)


def hold_and_end(pid):
    held = hold_offspring(pid)
    end(held)
    return len(held)


def test_of_a_process_that_has_ended_nobody_is_found():
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert hold_offspring(ended.pid) == []
