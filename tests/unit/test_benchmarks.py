"""The pure parts of benchmarks/: rounds, ratios, floors, tables and where they are filled in."""

import json

import numpy as np
import pytest

from benchmarks import tables, vector
from benchmarks.environments import LONG_S, LONG_SHARE, SHORT_S, Sleeper, StoredImages
from benchmarks.limit import Limit
from benchmarks.rows import ROWS, Pace, Rounds
from benchmarks.tables import Entry, Floor, Line, NoMarker
from benchmarks.workload import ActionPool, Workload, timed
from envfleet.cli.measure import Shares, Slice
from envfleet.observe.progress import Silent


class Scripted:
    """A contender whose rates are given, and that writes down when it ran."""

    def __init__(self, key, rates, log):
        self.key, self.label, self._rates, self._log = key, f"the {key}", iter(rates), log

    def open(self):
        pass

    def run(self, seconds):
        self._log.append(self.key)
        rate = next(self._rates)
        if rate is None:
            raise RuntimeError("out of breath")
        return Slice(rate, 1.0)

    def close(self):
        pass


def rounds_of(log=None, **rates):
    log = [] if log is None else log
    contenders = [Scripted(key, own, log) for key, own in rates.items()]
    num_rounds = max(map(len, rates.values()))
    return Rounds("work", contenders, Pace(num_rounds, 1.0), Silent(), "title")


def slices(*rates):
    return [Slice(rate, 1.0) for rate in rates]


class TestRounds:
    def test_everybody_runs_once_a_round_and_nobody_is_always_first(self):
        log: list[str] = []

        rounds_of(log, a=[1] * 6, b=[1] * 6, c=[1] * 6)

        each = [log[start : start + 3] for start in range(0, len(log), 3)]
        assert [sorted(one) for one in each] == [["a", "b", "c"]] * 6
        assert {one[0] for one in each} == {"a", "b", "c"}

    def test_a_line_is_the_median_of_the_ratios_within_rounds(self):
        # the machine halves its speed after the first round: no ratio sees it
        rounds = rounds_of(own=[400, 200, 300], other=[100, 50, 60])

        line = rounds.line("work", "other", 4.0, "own", "other")

        assert line.rounds == ((4.0, 4.0, 5.0),)
        assert line.values == (4.0,)
        assert line.is_kept

    def test_against_several_one_is_chosen_for_all_rounds(self):
        # the best of each round would be 100, 100, 100; no contender is that good
        rounds = rounds_of(own=[80, 80, 80], a=[100, 50, 100], b=[50, 100, 50])

        line = rounds.line("work", "the better of a and b", 0.95, "own", ["a", "b"])

        assert line.rounds == ((0.8, 1.6, 0.8),)

    def test_a_contender_that_fails_fails_its_own_lines(self):
        rounds = rounds_of(own=[10, 10], good=[5, 5], bad=[5, None])

        failed = rounds.line("work", "bad", 1.0, "own", "bad")

        assert not failed.is_kept
        assert failed.measured == "failed: bad: RuntimeError: out of breath"
        assert rounds.line("work", "good", 1.0, "own", "good").is_kept
        assert [entry.label for entry in rounds.entries()] == ["the own", "the good"]

    def test_pace_keeps_at_least_one_round(self):
        assert Pace(2, 0.5).scaled(rounds=1 / 5, seconds=4) == Pace(1, 2.0)


class TestFloors:
    @pytest.mark.parametrize(
        ("floor", "value", "holds"),
        [
            (Floor(12), 12.0, True),
            (Floor(12), 11.99, False),
            (Floor(0.2, is_ceiling=True), 0.2, True),
            (Floor(0.2, is_ceiling=True), 0.21, False),
        ],
    )
    def test_bounds_are_inclusive(self, floor, value, holds):
        assert floor.holds(value) is holds

    @pytest.mark.parametrize(
        ("floor", "value", "text"),
        [
            (Floor(12), 11.99, "11.9x"),
            (Floor(0.65), 0.6499, "0.64x"),
            (Floor(0.65), 1.15, "1.15x"),
            (Floor(0.2, is_ceiling=True), 0.201, "0.21x"),
            (Floor(5.0, "%", is_ceiling=True), 0.52, "0.6 %"),
        ],
    )
    def test_a_figure_never_looks_better_than_it_is(self, floor, value, text):
        assert floor.show(value) == text

    def test_bounds_as_text(self):
        assert str(Floor(12.0)) == ">= 12x"
        assert str(Floor(5.0, "%", is_ceiling=True)) == "<= 5 %"

    def test_a_line_without_figures_does_not_hold(self):
        assert not Line("work", "other", Floor(1), ()).is_kept

    def test_joined_lines_hold_together_or_not_at_all(self):
        good, bad = (Line("w", "o", Floor(0.95), (value,), ((value,),)) for value in (1.0, 0.9))

        joined = tables.joined([good, bad], "1 / 4 envs")

        assert (joined.work, joined.measured) == ("1 / 4 envs", "1.00x / 0.90x")
        assert joined.rounds == ((1.0,), (0.9,))
        assert not joined.is_kept


LINES = [
    Line("long work | with a bar", "Async", Floor(12), (13.37,), ((13.0, 13.37, 14.0),)),
    Line("work", "one core", Floor(5.0, "%", is_ceiling=True), (7.0,), ((7.0,),)),
]
ENTRIES = [
    Entry("work", "envfleet, step", (1000.0, 3000.0, 2000.0), Shares(0.5, 0.4, 0.1)),
    Entry("work", "Async", (150.0,)),
]


class TestTables:
    def test_text_lines_up(self):
        head, rule, first, second = tables.text_table(tables.floors_table(LINES)).splitlines()

        assert head.split() == ["work", "against", "floor", "measured", "ok"]
        assert first.index(">= 12x") + len(">= 12x") == second.index("<= 5 %") + len("<= 5 %")
        assert first.index("Async") == second.index("one core") == head.index("against")
        assert (first.endswith("13.3x  yes"), second.endswith("7.0 %  NO")) == (True, True)
        assert set(rule) == {"-", " "}

    def test_markdown_escapes_bars_and_aligns_numbers(self):
        head, rule, first, _ = tables.markdown_table(tables.floors_table(LINES)).splitlines()

        assert head == "| work | against | floor | measured | ok |"
        assert rule == "| --- | --- | ---: | ---: | --- |"
        assert first == "| long work \\| with a bar | Async | >= 12x | 13.3x | yes |"

    def test_rates_show_median_range_and_shares(self):
        fleet, other = tables.rates_table(ENTRIES).rows

        assert fleet[2:] == ("2,000", "1,000 to 3,000", "50%", "40%", "10%")
        assert other[2:] == ("150", "150 to 150", "", "", "")

    def test_shares_are_medians_of_those_that_are_known(self):
        own = [Slice(1, 1.0, Shares(part, 0.0, 0.0)) for part in (0.1, 0.2, 0.9)]

        fleet, other = tables.entries("w", {"a": "A", "b": "B"}, {"a": own, "b": slices(1)})

        assert fleet.shares == Shares(0.2, 0.0, 0.0)
        assert other.shares is None

    def test_lines_and_entries_survive_json(self):
        lines = json.loads(json.dumps([line.as_json() for line in LINES]))
        entries = json.loads(json.dumps([entry.as_json() for entry in ENTRIES]))

        assert [tables.line_from(line) for line in lines] == LINES
        assert [tables.entry_from(entry) for entry in entries] == ENTRIES


class TestFillIn:
    def test_replaces_what_is_between_the_markers_and_nothing_else(self):
        document = "a\n<!-- table:vector -->\nold\nold\n<!-- /table -->\nb\n"

        once = tables.fill_in(document, {"vector": "new \\1"})

        assert once == "a\n<!-- table:vector -->\nnew \\1\n<!-- /table -->\nb\n"
        assert tables.fill_in(once, {"vector": "new \\1"}) == once

    def test_fills_empty_places_and_leaves_other_tables_alone(self):
        document = (
            "<!-- table:vector -->\n<!-- /table -->\n<!-- table:else -->\nkept\n<!-- /table -->"
        )

        filled = tables.fill_in(document, {"vector": "new", "rates": "unused"})

        assert filled == (
            "<!-- table:vector -->\nnew\n<!-- /table -->\n"
            "<!-- table:else -->\nkept\n<!-- /table -->"
        )

    def test_a_marker_without_end_swallows_nothing(self):
        document = "<!-- table:vector -->\ntext\n<!-- table:else -->\nkept\n<!-- /table -->"

        with pytest.raises(NoMarker, match="table:vector"):
            tables.fill_in(document, {"vector": "new"})

    def test_a_document_without_a_place_is_an_error(self):
        with pytest.raises(NoMarker, match="no place"):
            tables.fill_in("nothing here", {"vector": "new"})


RESULT = {
    "command": "python benchmarks/vector.py",
    "machine": {
        "processor": "Abacus",
        "cores": 2,
        "memory_bytes": 2**34,
        "system": "Linux 1",
        "python": "3.11.0",
        "packages": {"envfleet": "1.0"},
    },
    "rounds": 15,
    "seconds": 0.5,
    "rows": {
        "cartpole": {
            "lines": [LINES[0].as_json()],
            "entries": [entry.as_json() for entry in ENTRIES],
            "notes": ["auto chose: well"],
        }
    },
}
EMPTY: dict[str, list] = {"lines": [], "entries": [], "notes": []}


class TestCommand:
    def test_fills_in_an_earlier_run(self, tmp_path, capsys):
        (tmp_path / "run.json").write_text(json.dumps(RESULT))
        readme = tmp_path / "README.md"
        readme.write_text("# x\n<!-- table:vector -->\n<!-- /table -->\n")

        code = vector.main(["--from", str(tmp_path / "run.json"), "--write", str(readme)])

        shown = capsys.readouterr().out
        assert code == 0
        for part in ("13.3x", "2 cores of Abacus, 16 GB", "envfleet 1.0", "benchmarks/vector.py"):
            assert part in readme.read_text()
            assert part in shown

    @pytest.mark.parametrize(("extra", "code"), [([], 1), (["--quick"], 0)])
    def test_a_missed_floor_is_an_exit_code_unless_quick(self, tmp_path, capsys, extra, code):
        missed = {**RESULT, "rows": {"x": {**EMPTY, "lines": [LINES[1].as_json()]}}}
        (tmp_path / "run.json").write_text(json.dumps(missed))

        assert vector.main(["--from", str(tmp_path / "run.json"), *extra]) == code
        assert "1 of 1 floors missed" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["--rows", "cartpole,nonsense"], "no row nonsense"),
            (["--quick", "--write", "x.md"], "needs a full run"),
            (["--rounds", "0"], "must be more than 0"),
        ],
    )
    def test_misuse_is_one_sentence(self, arguments, reason, capsys):
        with pytest.raises(SystemExit, match="2"):
            vector.main(arguments)

        assert reason in capsys.readouterr().err

    def test_every_row_says_what_it_is_about(self):
        assert all(row.__doc__ for row in ROWS.values())


class TestWorkload:
    def test_single_actions_are_the_batches_cut_up(self):
        work = Workload("CartPole-v1", 4)

        halves = work.single_actions(0, 2), work.single_actions(2, 4)

        for batch, first, second in zip(work.action_batches(), *halves, strict=True):
            assert [*first, *second] == batch.tolist()

    def test_only_the_first_slot_is_checked(self):
        first, second = (env_fn() for env_fn in Workload("CartPole-v1", 2).env_fns)

        assert "PassiveEnvChecker" in str(first)
        assert "PassiveEnvChecker" not in str(second)

    def test_a_pool_cycles_through_prepared_actions(self):
        pool = ActionPool(Workload("CartPole-v1", 4))

        drawn = [pool.next(2) for _ in range(32)]

        assert all(one is two for one, two in zip(drawn[:16], drawn[16:], strict=True))

    def test_what_warms_up_is_not_counted(self):
        calls = 0

        def step():
            nonlocal calls
            calls += 1
            return 5

        measured = timed(step, 0.01)

        assert measured.steps < 5 * calls
        assert measured.seconds >= 0.01


class TestEnvironments:
    def test_images_are_handed_out_not_made(self):
        env = StoredImages()
        env.reset(seed=0)

        frames = [env.step(np.int64(0))[0] for _ in range(2 * env.num_frames)]

        assert all(frame in env.observation_space for frame in frames)
        assert len({id(frame) for frame in frames}) == env.num_frames

    def test_a_tenth_of_the_naps_is_long(self):
        env = Sleeper()
        env.reset(seed=0)
        naps_s = np.array(env._naps_s)

        assert set(naps_s) == {SHORT_S, LONG_S}
        assert abs((naps_s == LONG_S).mean() - LONG_SHARE) < 0.02


def test_the_limit_counts_every_step_and_leaves_nothing_behind():
    limit = Limit(Workload("CartPole-v1", 3, num_workers=2))
    try:
        limit.open()
        measured = limit.run(0.02)
    finally:
        limit.close()

    assert measured.steps > 0
    assert measured.steps % 3 == 0
    assert measured.seconds > 0
