"""The page of a run, from the record alone; what a browser makes of it is tested in e2e."""

import re
from dataclasses import replace
from html import unescape

import pytest

from envfleet.observe import report
from envfleet.observe.learning_report import learning_page
from envfleet.observe.report import JobPage, OptionValue, RunRecord, Video

RUN = RunRecord(
    folder="runs/one",
    name="one",
    env="CartPole-v1",
    state="finished",
    total_steps=512,
    options={"Run": [OptionValue("seed", 3, 0), OptionValue("n_envs", 8, 8)], "PPO": []},
    iterations=[
        {"env_steps": steps, "iteration": steps // 64, "mean_return": mean, "value_loss": 1.5}
        for steps, mean in ((64, None), (128, 20.0), (192, 25.5))
    ],
    evaluations=[
        {"env_steps": 128, "evaluation_mean": 30.25, "evaluation_std": 2.0},
        {"env_steps": 192, "evaluation_mean": 30.25, "evaluation_std": 1.0},
    ],
    seconds=200.0,
    shares={"learning": 0.75, "environments": 0.25},
    verdict="75% learning: try fewer epochs",
    advice=["25% environments: buy faster ones"],
    command="envfleet train --env CartPole-v1 --no-recipe --seed 3",
    facts={
        "started": "2026-01-02T03:04:05+00:00",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "machine": {"cpu": "a fast one", "cores": 2},
        "git": {"commit": "c0ffee", "is_dirty": True},
    },
)
INCIDENT = {
    "time": "2026-01-02T03:05:06+00:00",
    "env_steps": 128,
    "slot": 3,
    "kind": "death",
    "doing": "step",
    "seed": 17,
    "reason": "killed",
    "replay": "incidents/0001-slot3.incident",
}


EVIL = '</script><script>alert(1)</script>"><img src=x onerror=alert(1)>'


def render(run):
    """The page of a run that learns."""
    return report.render(run, learning_page(run, "PPO"))


def text(page):
    """What is read, without markup."""
    body = page[page.index("<body>") :]
    return " ".join(re.sub(r"<script>.*</script>|<[^>]*>", " ", body, flags=re.DOTALL).split())


def test_all_of_it_is_on_the_page():
    said = text(render(RUN))
    for words in (
        "CartPole-v1 finished",
        "begun 2026-01-02 03:04:05 UTC",
        "best evaluation 30.25 at 192 steps",
        "mean return 25.5 of the last 100 episodes",
        "environment steps 192 of 512",
        "time 3 min 20 s",
        "No environment raised, hung or died.",
        "learning 75.0%, 2 min 30 s",
        "75% learning: try fewer epochs. 25% environments: buy faster ones.",
        "torch 2.13.0",
        "a fast one",
        "c0ffee",
        "tracked files changed",
    ):
        assert words in said
    assert "envfleet train --env CartPole-v1 --no-recipe --seed 3" in re.sub(" +", " ", said)


def test_nodes_that_were_slow_or_lost_are_named():
    assert "Nodes" not in text(render(RUN))
    slow = {"env_steps": 1_024, "kind": "slow", "where": "node a1b2", "why": "its block took 9 s"}
    assert "node a1b2 slow its block took 9 s" in text(render(replace(RUN, events=[slow])))


def test_only_what_differs_from_the_defaults_is_marked():
    marked = re.findall(r'<tr class="changed">(.*?)</tr>', render(RUN))
    assert len(marked) == 1
    assert text(f"<body>{marked[0]}") == "seed 3 0"


def test_the_evaluation_that_is_kept_as_the_best_is_marked():
    (best,) = re.findall(r'<tr class="best">(.*?)</tr>', render(RUN))
    assert text(f"<body>{best}") == "192 30.25 1 best.pt"


def test_a_run_that_has_just_begun_reads_well():
    new = replace(RUN, iterations=[], evaluations=[], shares={}, seconds=0.0, state="unfinished")
    said = text(render(new))
    for words in (
        "best evaluation none yet",
        "environment steps 0 of 512",
        "nothing was measured yet",
        "The policy has not been evaluated yet.",
        "No iteration is done yet.",
        "Nothing was measured yet.",
    ):
        assert words in said
    assert "None" not in said
    assert "nan" not in said.lower()


def test_a_run_that_can_go_on_says_how():
    said = text(render(replace(RUN, state="stopped", resume_command="envfleet train --resume x")))
    assert "Go on with this one:" in said
    assert "Go on with this one:" not in text(render(RUN))


def test_a_failed_run_says_why():
    said = text(render(replace(RUN, state="failed", reason="slot 3 is quarantined")))
    assert "CartPole-v1 failed" in said
    assert "slot 3 is quarantined" in said


def test_incidents_are_told_with_their_replay():
    run = replace(RUN, incidents=[INCIDENT, {**INCIDENT, "seed": None, "replay": None}])
    said = text(render(run))
    assert "envfleet doctor replay runs/one/incidents/0001-slot3.incident" in said
    assert "2026-01-02 03:05:06 128 3 death during step 17 killed" in said
    assert "continued killed not kept" in said
    assert "incidents 2" in said


def test_a_run_in_parts_shows_where_it_went_on_and_what_changed():
    part = {
        "env_steps": 64,
        "started": "2026-01-03T00:00:00+00:00",
        "versions": {"python": "3.11.7", "torch": "2.14.0"},
        "machine": RUN.facts["machine"],
        "git": RUN.facts["git"],
    }
    page = render(replace(RUN, resumed=[part]))
    said = text(page)
    assert "at 64 steps, 2026-01-03 00:00:00 UTC (torch 2.13.0 became 2.14.0)" in said
    assert page.count('<line class="break"') == 1


def test_figures_that_nobody_knows_yet_are_drawn():
    run = replace(RUN, iterations=[{**one, "grad_norm": 0.5} for one in RUN.iterations])
    assert "grad norm" in text(render(run))


def test_a_job_adds_tiles_and_sections_of_its_own():
    page = JobPage(
        "dreams",
        [report.tile("tokens", "12")],
        [report.section("Turns", report.empty(EVIL), report.table(("a",), []))],
    )
    said = text(report.render(RUN, page))
    assert said.startswith("envfleet · dreams CartPole-v1 finished")
    assert "tokens 12 environment steps 192 of 512" in said
    assert said.index("Turns") < said.index("Where the time went")
    assert "Learning curve" not in said
    assert "<img" not in report.render(RUN, page)


def test_a_video_is_part_of_the_page():
    page = render(replace(RUN, video=Video("videos/a.mp4", b"\x00\x01mp4")))
    assert 'src="data:video/mp4;base64,AAFtcDQ="' in page


@pytest.mark.parametrize(
    "change",
    [
        {"env": EVIL},
        {"name": EVIL},
        {"folder": EVIL, "incidents": [INCIDENT]},
        {"reason": EVIL},
        {"verdict": EVIL},
        {"advice": [EVIL]},
        {"command": EVIL},
        {"resume_command": EVIL},
        {"incidents": [dict.fromkeys(INCIDENT, EVIL) | {"env_steps": 1}]},
        {"options": {EVIL: [OptionValue(EVIL, EVIL, 0)]}},
        {"shares": {EVIL: 1.0}},
        {"facts": {"versions": {EVIL: EVIL}, "machine": {EVIL: EVIL}, "started": EVIL}},
        {"iterations": [{**RUN.iterations[1], EVIL.replace("/", ""): 1.0}]},
        {"video": Video(EVIL, b"")},
        {"resumed": [{"env_steps": 1, "started": EVIL, "versions": {EVIL: EVIL}}]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_comes_from_outside_is_text(change):
    page = render(replace(RUN, **change))
    assert page.count("<script") == render(RUN).count("<script") == 1
    assert "<img" not in page


def test_nothing_is_asked_of_the_network():
    page = unescape(render(RUN))
    assert set(re.findall(r"https?://[^\s\"')]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert not re.search(r"<(link|img|iframe|object)", page)
