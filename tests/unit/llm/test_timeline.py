"""Traces and pictures of where the time of trajectories went."""

import json
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from envfleet.llm.timeline import MOST_LANES, PHASES, chrome_trace, end_of, timeline_chart
from envfleet.llm.trajectories import TrajectoryFailure, TurnTimes
from envfleet.observe.charts import part_colour
from tests.unit.llm.made_trajectories import trajectory, turn


def parsed(markup):
    return ElementTree.fromstring(markup)


class TestTrace:
    def test_a_turn_s_phases_follow_each_other_from_its_start(self):
        trace = chrome_trace([trajectory(rewards=(0.0, 1.0))])
        spans = [one for one in trace["traceEvents"] if one["ph"] == "X"]
        second = [one for one in spans if one["args"]["turn"] == 1]

        assert [one["name"] for one in second] == list(PHASES)
        assert second[0]["ts"] == 1e6
        for before, after in pairwise(second):
            assert after["ts"] == pytest.approx(before["ts"] + before["dur"])
        assert sum(one["dur"] for one in second) == pytest.approx(0.66e6)

    def test_groups_are_processes_and_environments_are_threads_with_names(self):
        trace = chrome_trace([trajectory(0), trajectory(1), trajectory(2)])
        names = [
            (one["pid"], one["tid"], one["args"]["name"])
            for one in trace["traceEvents"]
            if one["ph"] == "M"
        ]

        assert names == [
            (0, 0, "group 0, FrozenLake"),
            (0, 0, "environment 0"),
            (0, 1, "environment 1"),
            (1, 2, "group 1, FrozenLake"),
            (1, 2, "environment 2"),
        ]

    def test_a_failure_is_an_instant_where_it_ended(self):
        failed = trajectory(failure=TrajectoryFailure(reason="engine", error="gone"))
        (instant,) = [one for one in chrome_trace([failed])["traceEvents"] if one["ph"] == "i"]

        assert instant["ts"] == pytest.approx(0.66e6)
        assert instant["args"] == {"error": "gone"}

    def test_it_is_json(self):
        json.dumps(chrome_trace([trajectory()]), allow_nan=False)


class TestPicture:
    def test_parts_stand_where_their_times_are(self):
        chart = parsed(timeline_chart([trajectory(rewards=(0.0, 1.0))]))
        x0, x1, *_ = map(float, chart.find(".//svg").get("data-range").split())
        rects = list(chart.iter("rect"))

        assert [x0, x1] == pytest.approx([0.0, 1.66])
        assert len(rects) == 10
        decode = rects[7]
        assert float(decode.get("x")) / 1000 * x1 == pytest.approx(1.3, abs=1e-2)
        assert float(decode.get("width")) / 1000 * x1 == pytest.approx(0.3, abs=1e-2)
        assert decode.find("title").text.startswith("turn 2, decode")

    def test_many_are_thinned_from_the_first_to_the_last_to_end(self):
        late = [
            trajectory(i, turns=[turn(0, times=TurnTimes(start_s=float(i)))]) for i in range(1000)
        ]
        chart = parsed(timeline_chart(late))
        labels = [one.get("data-label") for one in chart.iter("g")]

        assert len(labels) == MOST_LANES
        assert (labels[0], labels[-1]) == ("environment 0", "environment 999")
        assert f"{MOST_LANES} of 1000 trajectories" in "".join(chart.itertext())

    def test_a_rollout_that_has_not_begun_says_so(self):
        assert "nothing was measured yet" in timeline_chart([trajectory(turns=[])])
        assert end_of(trajectory(turns=[])) == 0.0


def test_every_phase_has_a_colour_of_its_own() -> None:
    assert len({part_colour(name) for name in (*PHASES, "journal", "anything")}) == 7
