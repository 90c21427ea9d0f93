"""The page of `envfleet view`, in a real browser, while its rollout goes on."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from envfleet.llm.journal import Journal
from envfleet.llm.trajectories import TrajectoryFailure
from tests.e2e.devtools import open_tab
from tests.unit.llm.made_trajectories import trajectory, turn

EVIL = '<script>window.isHacked = 1</script><img src=x onerror="window.isHacked = 1">'


def write(journal, one):
    journal.begin(one)
    for each in one.turns:
        journal.turn(one, each)
    if one.is_done:
        journal.end(one)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    evil = replace(turn(0), state=EVIL, llm_response=EVIL, info={EVIL: EVIL})
    seen = replace(turn(0), state="<images>", images=("images/a.png",), penalty=-0.1)
    failure = TrajectoryFailure(reason="timeout", error=f"took too long {EVIL}")
    with Journal(folder, {}) as journal:
        write(journal, trajectory(0, rewards=(0.0, 1.0), is_success=True))
        write(journal, trajectory(1, turns=[evil], final_state=EVIL, tag=EVIL))
        write(journal, trajectory(2, turns=[seen], failure=failure))
        write(journal, trajectory(3, rewards=(0.0,), is_done=False))
        for env_id in range(4, 120):
            write(journal, trajectory(env_id, tag="Bandit"))
    (folder / "images").mkdir()
    Image.fromarray(np.full((4, 6, 3), 200, np.uint8)).save(folder / "images" / "a.png")
    return folder


@pytest.fixture
def address(run):
    """What `envfleet view` prints; Ctrl-C ends it, with nothing wrong."""
    command = [sys.executable, "-m", "envfleet", "view", run, "--no-browser"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stderr is not None
        said = ""
        while "Ctrl-C" not in said:
            line = running.stderr.readline()
            assert line, said
            said += line
        found = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", said)
        assert found, said
        yield found.group()
    finally:
        os.kill(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (0, "")
    assert "Showed 120 conversations" in out


def texts(tab, chosen):
    return tab.find(f"[...document.querySelectorAll({chosen!r})].map((one) => one.textContent)")


def choose(tab, env_id):
    tab.wait_for(f"!!document.querySelector('[data-key=\"{env_id}.0\"]')")
    tab.find(f"document.querySelector('.row[data-key=\"{env_id}.0\"]').click()")
    tab.wait_for(f"!!document.querySelector('.talk[data-key=\"{env_id}.0\"] .turn')")


def filter_by(tab, name, value, num_rows):
    tab.find(
        f"filters[{name!r}].value = {value!r};"
        "filters.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    tab.wait_for(f"document.querySelectorAll('.row').length === {num_rows}")


def test_conversations_are_shown_filtered_escaped_and_grow(run, address, tmp_path):
    with open_tab(tmp_path) as tab:
        tab.go(address)

        # a conversation
        choose(tab, 0)
        cards = texts(tab, ".talk .turn")
        assert len(cards) == 3
        assert "Turn 1" in cards[0]
        assert "state 0" in cards[0]
        assert "Left" in cards[1]
        assert "reward +1" in cards[1]
        assert "In the end" in cards[2]
        assert texts(tab, ".talk h2 .chip") == ["success"]

        # what comes from a run is never markup
        choose(tab, 1)
        state, final = texts(tab, ".talk .state > .text")
        assert (state, final) == (EVIL, EVIL)
        assert tab.find("document.querySelectorAll('main script, main img, aside img').length") == 0
        assert tab.find("window.isHacked === undefined")

        # a picture, a penalty and a failure
        choose(tab, 2)
        tab.wait_for("document.querySelector('.talk img').naturalWidth === 6")
        assert "penalty \N{MINUS SIGN}0.1" in texts(tab, ".talk .turn")[0]
        assert texts(tab, ".talk .note") == [f"took too long {EVIL}"]

        # filters, and pages
        assert tab.find("document.querySelectorAll('.row').length") == 50
        assert texts(tab, "#where") == ["1 to 50 of 120"]
        tab.find("document.getElementById('next').click()")
        tab.wait_for("document.getElementById('where').textContent === '51 to 100 of 120'")
        filter_by(tab, "state", "timeout", 1)
        assert "environment 2" in texts(tab, ".row")[0]
        tab.find("filters.state.value = ''; refresh(false); refresh(true)")  # a poll just then
        tab.wait_for("document.querySelectorAll('.row').length === 50")
        filter_by(tab, "least", "0.5", 1)
        filter_by(tab, "least", "", 50)
        filter_by(tab, "group_id", "1", 2)

        # two beside each other, also after the page was loaded anew
        tab.find(
            "document.querySelector('.row[data-key=\"3.0\"]')"
            ".dispatchEvent(new MouseEvent('click', {ctrlKey: true, bubbles: true}))"
        )
        tab.wait_for("document.querySelectorAll('.talk .turn').length === 3")
        kept = tab.find("location.href")
        tab.go("about:blank")
        tab.go(kept)
        tab.wait_for("document.querySelectorAll('.talk .turn').length === 3")
        assert tab.find("document.querySelectorAll('.row').length") == 2

        # what is played now is seen
        with Journal(run, {}) as journal:
            journal.turn(trajectory(3), turn(1, reward=0.25))
            tab.wait_for("document.querySelectorAll('[data-key=\"3.0\"] .turn').length === 2")
            assert texts(tab, ".talk[data-key='3.0'] h2 .chip") == ["going on"]
            journal.end(trajectory(3, rewards=(0.0, 0.25), is_success=True))
        tab.wait_for("document.querySelector('[data-key=\"3.0\"] .chip').textContent === 'success'")
        tab.wait_for("document.getElementById('live-text').textContent === 'complete'")

        assert tab.console == []
