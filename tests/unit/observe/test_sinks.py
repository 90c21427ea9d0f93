"""Figures reach every sink; one that fails costs a warning and nothing else."""

import json
import warnings
from pathlib import Path

import pytest

from envfleet.observe.append import append
from envfleet.observe.figures import FIGURES, curves, figure
from envfleet.observe.jsonl import JsonLines, add_line, read_lines, rewrite
from envfleet.observe.sinks import Sinks
from tests.unit.observe.small_disk import files_no_larger_than

DOCS = Path(__file__).parents[3] / "docs" / "runs.md"


class Remembering:
    def __init__(self):
        self.seen, self.is_closed, self.fails = [], False, False

    def note(self, env_steps, figures):
        if self.fails:
            raise OSError(28, "No space left on device")
        self.seen.append((env_steps, dict(figures)))

    def close(self):
        self.is_closed = True
        if self.fails:
            raise OSError(28, "No space left on device")


class TestSinks:
    def test_every_sink_is_told_and_closed(self):
        one, other = Remembering(), Remembering()
        sinks = Sinks([lambda: one, lambda: other])
        sinks.note(64, {"loss": 1.0})
        sinks.close()
        assert one.seen == other.seen == [(64, {"loss": 1.0})]
        assert one.is_closed
        assert other.is_closed

    def test_a_failing_sink_is_warned_of_once_and_tried_again(self):
        bad, good = Remembering(), Remembering()
        sinks = Sinks([lambda: bad, lambda: good])
        bad.fails = True
        with pytest.warns(RuntimeWarning, match=r"Remembering could not note .* at 64 steps.*No s"):
            sinks.note(64, {})
        sinks.note(128, {})  # a second warning would be an error here
        bad.fails = False
        sinks.note(192, {})
        bad.fails = True
        with pytest.warns(RuntimeWarning, match="at 256 steps"):
            sinks.note(256, {})
        assert [steps for steps, _ in good.seen] == [64, 128, 192, 256]
        assert [steps for steps, _ in bad.seen] == [192]

    def test_a_sink_that_cannot_be_opened_is_left_out(self):
        def broken():
            raise PermissionError(13, "Permission denied")

        good = Remembering()
        with pytest.warns(RuntimeWarning, match="one place less: PermissionError"):
            sinks = Sinks([broken, lambda: good])
        sinks.note(1, {})
        assert good.seen

    def test_a_sink_that_cannot_be_closed_does_not_keep_the_others_open(self):
        bad, good = Remembering(), Remembering()
        bad.fails = True
        sinks = Sinks([lambda: bad, lambda: good])
        with pytest.warns(RuntimeWarning, match="could not be closed"):
            sinks.close()
        assert good.is_closed


class TestAppend:
    def test_records_follow_each_other(self, tmp_path):
        append(tmp_path / "a", b"one\n")
        append(tmp_path / "a", b"two\n")
        assert (tmp_path / "a").read_bytes() == b"one\ntwo\n"

    def test_a_record_that_does_not_fit_leaves_nothing_of_itself(self, tmp_path):
        append(tmp_path / "a", b"x" * 100)
        with files_no_larger_than(150), pytest.raises(OSError, match="File too large"):
            append(tmp_path / "a", b"y" * 100)
        assert (tmp_path / "a").read_bytes() == b"x" * 100
        append(tmp_path / "a", b"z")
        assert (tmp_path / "a").read_bytes() == b"x" * 100 + b"z"


class TestJsonLines:
    def test_a_full_disk_costs_lines_and_breaks_none(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        sinks = Sinks([lambda: JsonLines(path)])
        sinks.note(1, {"loss": 0.5})
        with files_no_larger_than(path.stat().st_size + 5), warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            sinks.note(2, {"loss": 0.25})
        sinks.note(3, {"loss": 0.125})
        assert read_lines(path) == [{"env_steps": 1, "loss": 0.5}, {"env_steps": 3, "loss": 0.125}]
        assert path.read_text().count("\n") == 2

    def test_json_has_no_nan(self, tmp_path):
        add_line(tmp_path / "a", {"x": float("nan"), "y": float("inf"), "z": 1.5})
        line = (tmp_path / "a").read_text()
        assert json.loads(line, parse_constant=pytest.fail) == {"x": None, "y": None, "z": 1.5}

    @pytest.mark.parametrize("rest", ['{"env_steps": 2, "lo', "17\n", "\n", "\x00\x00\x00"])
    def test_half_a_line_is_passed_over(self, rest, tmp_path):
        (tmp_path / "a").write_text('{"env_steps": 1}\n' + rest)
        assert read_lines(tmp_path / "a") == [{"env_steps": 1}]

    def test_no_file_has_no_lines(self, tmp_path):
        assert read_lines(tmp_path / "nowhere") == []

    def test_half_a_surrogate_pair_costs_no_file(self, tmp_path):
        rewrite(tmp_path / "report.html", "bad \ud83d text")
        assert (tmp_path / "report.html").read_text() == r"bad \ud83d text"

    def test_a_file_is_rewritten_as_a_whole(self, tmp_path):
        rewrite(tmp_path / "a", "before")
        with files_no_larger_than(3), pytest.raises(OSError, match="File too large"):
            rewrite(tmp_path / "a", "after")
        assert (tmp_path / "a").read_text() == "before"


class TestFigures:
    def test_curves_have_the_names_that_sb3_gives_them(self):
        found = curves({"mean_return": 20.0, "entropy": 0.5, "approx_kl": 0.01, "iteration": 3})
        assert found == {
            "rollout/ep_rew_mean": 20.0,
            "train/entropy_loss": -0.5,
            "train/approx_kl": 0.01,
            "time/iterations": 3,
        }

    def test_only_numbers_are_drawn(self):
        odd = {"mean_return": None, "ended": "stopped", "value_loss": float("nan"), "epochs": 4}
        assert curves(odd) == {"train/epochs": 4}

    def test_a_new_figure_of_the_learner_is_drawn_too(self):
        assert curves({"grad_norm": 1.5}) == {"train/grad_norm": 1.5}
        assert curves({"seconds/the rest": 1.5}) == {"time/seconds_the_rest": 1.5}
        assert figure("grad_norm").title == "grad norm"

    def test_each_is_explained_in_the_guide(self):
        guide = DOCS.read_text()
        for one in FIGURES:
            assert f"| `{one.name}` | `{one.curve}` | {one.meaning}" in guide
