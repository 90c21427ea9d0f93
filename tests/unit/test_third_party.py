"""benchmarks/third_party.py and clients.py: what they make of what their programs say."""

import sys

import pytest

from benchmarks import clients, third_party
from benchmarks.own_interpreter import Ended, run
from benchmarks.third_party_envs import SUBJECTS
from benchmarks.third_party_probe import CHECKS


def test_a_program_and_what_it_started_end_at_their_deadline():
    # its child holds the other end of what is read here, and would do so for ten minutes
    code = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("said", flush=True)
time.sleep(600)
"""
    ended = run([sys.executable, "-c", code], 5.0)
    assert (ended.code, ended.out, ended.how) == (None, "said\n", "no end before its deadline")


@pytest.mark.parametrize(
    ("ended", "cell"),
    [
        (Ended(0, 'noise\n{"cell": "yes", "note": ""}\nbye\n', ""), "yes"),
        (Ended(0, "", "left early"), "exit code 0"),
        (Ended(-11, '{"cell": "yes", "note": ""}', "trouble"), "ended by SIGSEGV"),
        (Ended(None, "", ""), "no end before its deadline"),
    ],
)
def test_a_check_that_does_not_end_well_is_a_cell(ended, cell):
    assert third_party.result(ended)["cell"] == cell


def test_every_check_is_a_column_and_every_client_has_its_packages():
    assert tuple(CHECKS) == third_party.CHECKS
    assert len({subject.name for subject in SUBJECTS}) == len(SUBJECTS)
    named = {program.client for program in clients.programs(clients.PAGE.read_text())}
    assert named - {None} == set(clients.PACKAGES)
    found = {
        SUBJECTS[0].name: {"reason": "pip: no", "cells": {}},
        SUBJECTS[1].name: {"reason": "", "cells": {"serial": {"cell": "no", "note": "slot 1"}}},
    }
    rows = third_party.table(found).rows
    assert [row[1] for row in rows] == ["not installed", ""]
    assert third_party.notes(found) == (
        f"- {SUBJECTS[0].name}: pip: no\n- {SUBJECTS[1].name}, serial: slot 1"
    )
