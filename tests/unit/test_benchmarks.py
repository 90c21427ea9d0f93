"""Tests of benchmarks/: rounds, ratios, targets, tables, documents, and every row."""

import json
import os
import re
import shlex
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from benchmarks import (
    cluster_rows,
    llm_rollout,
    llm_rollout_rows,
    machine,
    meta,
    multiagent_rows,
    peer_sokoban,
    ppo,
    ppo_rows,
    state_manager,
    state_manager_rows,
    suite,
    tables,
    vector,
    vector_rows,
    without_c,
)
from benchmarks.environments import LONG_S, LONG_SHARE, SHORT_S, Sleeper, StoredImages
from benchmarks.fresh_process import EndedEarly, in_fresh_processes
from benchmarks.limit import Limit
from benchmarks.rollouts import Rollouts, both_ways
from benchmarks.rounds import Pace, Rounds
from benchmarks.scale_model import Costs, predict
from benchmarks.tables import Curves, Entry, Line, NoMarker, Target
from benchmarks.trainers import TrainerOverhead, Training, sb3_ways
from benchmarks.training_runs import TrainingTask, one_run
from benchmarks.webshop_search import Searching, Weighed, built, size_of
from benchmarks.workload import ActionPool, Workload, timed
from envfleet.cli.app import build_parser
from envfleet.cli.measure import Shares, Slice
from envfleet.cli.train_args import read_train_args
from envfleet.learn.ppo import PPOOptions
from envfleet.learn.recipes import RECIPES
from envfleet.learn.train_options import TrainOptions
from envfleet.llm.environments.webshop import store
from envfleet.observe.progress import Silent

ROOT = Path(__file__).parents[2]


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
    def test_each_contender_runs_once_a_round_and_none_is_always_first(self):
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
        assert line.is_met

    def test_against_several_one_is_chosen_for_all_rounds(self):
        # the best of each round would be 100, 100, 100; no contender is that good
        rounds = rounds_of(own=[80, 80, 80], a=[100, 50, 100], b=[50, 100, 50])

        line = rounds.line("work", "the better of a and b", 0.95, "own", ["a", "b"])

        assert line.rounds == ((0.8, 1.6, 0.8),)

    def test_a_contender_that_fails_fails_its_own_lines(self):
        rounds = rounds_of(own=[10, 10], good=[5, 5], bad=[5, None])

        failed = rounds.line("work", "bad", 1.0, "own", "bad")

        assert not failed.is_met
        assert failed.measured == "failed: bad: RuntimeError: out of breath"
        assert rounds.line("work", "good", 1.0, "own", "good").is_met
        assert [entry.label for entry in rounds.entries()] == ["the own", "the good"]

    def test_pace_keeps_at_least_one_round(self):
        assert Pace(2, 0.5).scaled(rounds=1 / 5, seconds=4) == Pace(1, 2.0)


class TestFloors:
    @pytest.mark.parametrize(
        ("target", "value", "holds"),
        [
            (Target(12), 12.0, True),
            (Target(12), 11.99, False),
            (Target(0.2, is_ceiling=True), 0.2, True),
            (Target(0.2, is_ceiling=True), 0.21, False),
        ],
    )
    def test_bounds_are_inclusive(self, target, value, holds):
        assert target.is_met_by(value) is holds

    @pytest.mark.parametrize(
        ("target", "value", "text"),
        [
            (Target(12), 11.99, "11.9x"),
            (Target(0.65), 0.6499, "0.64x"),
            (Target(0.65), 1.15, "1.15x"),
            (Target(0.2, is_ceiling=True), 0.201, "0.21x"),
            (Target(5.0, "%", is_ceiling=True), 0.52, "0.6 %"),
            (Target(-129.0, ""), -110.01, "-110.1"),
            (Target(-5.0, ""), -4.001, "-4.01"),
            (Target(10.0, "%", is_ceiling=True), -5.29, "-5.2 %"),
        ],
    )
    def test_a_figure_never_looks_better_than_it_is(self, target, value, text):
        assert target.show(value) == text

    def test_bounds_as_text(self):
        assert str(Target(12.0)) == ">= 12x"
        assert str(Target(5.0, "%", is_ceiling=True)) == "<= 5 %"
        assert str(Target(-91.5, "")) == ">= -91.5"

    def test_a_line_without_figures_does_not_hold(self):
        assert not Line("work", "other", Target(1), ()).is_met

    def test_joined_lines_hold_together_or_not_at_all(self):
        good, bad = (Line("w", "o", Target(0.95), (value,), ((value,),)) for value in (1.0, 0.9))

        joined = tables.joined([good, bad], "1 / 4 envs")

        assert (joined.work, joined.measured) == ("1 / 4 envs", "1.00x / 0.90x")
        assert joined.rounds == ((1.0,), (0.9,))
        assert not joined.is_met


LINES = [
    Line("long work | with a bar", "Async", Target(12), (13.37,), ((13.0, 13.37, 14.0),)),
    Line("work", "one core", Target(5.0, "%", is_ceiling=True), (7.0,), ((7.0,),)),
]
ENTRIES = [
    Entry("work", "envfleet, step", (1000.0, 3000.0, 2000.0), Shares(0.5, 0.4, 0.1)),
    Entry("work", "Async", (150.0,)),
]
CURVES = Curves("work", {0: ((10, 1.0, 0.5), (20, 3.0, 0.0)), 3: ((10, 2.0, 0.0), (20, 7.0, 1.0))})


class TestTables:
    def test_text_lines_up(self):
        head, rule, first, second = tables.text_table(tables.targets_table(LINES)).splitlines()

        assert head.split() == ["work", "against", "target", "measured", "met"]
        assert first.index(">= 12x") + len(">= 12x") == second.index("<= 5 %") + len("<= 5 %")
        assert first.index("Async") == second.index("one core") == head.index("against")
        assert (first.endswith("13.3x  yes"), second.endswith("7.0 %  NO")) == (True, True)
        assert set(rule) == {"-", " "}

    def test_markdown_escapes_bars_and_aligns_numbers(self):
        head, rule, first, _ = tables.markdown_table(tables.targets_table(LINES)).splitlines()

        assert head == "| work | against | target | measured | met |"
        assert rule == "| --- | --- | ---: | ---: | --- |"
        assert first == "| long work \\| with a bar | Async | >= 12x | 13.3x | yes |"

    def test_rates_show_median_range_and_shares(self):
        fleet, other = tables.rates_table(ENTRIES).rows

        assert fleet[2:] == ("2,000", "1,000 to 3,000", "50%", "40%", "10%")
        assert other[2:] == ("150", "150 to 150", "", "", "")

    def test_without_shares_there_are_no_columns_for_them(self):
        table = tables.rates_table(ENTRIES[1:])

        assert table.columns == ("work", "contender", "steps/s", "rounds")
        assert table.rows == (("work", "Async", "150", "150 to 150"),)

    def test_lines_can_name_their_row(self):
        table = tables.targets_table(LINES, ["long", "thinking"])

        assert table.columns[:2] == ("row", "work")
        assert [cells[0] for cells in table.rows] == ["long", "thinking"]

    def test_lines_can_end_with_their_command(self):
        table = tables.targets_table(LINES, commands=["make long", "make thinking"])

        assert table.columns == ("work", "against", "target", "measured", "met", "command")
        assert [cells[-1] for cells in table.rows] == ["make long", "make thinking"]

    def test_curves_are_means_over_seeds_and_end_with_each_seed(self):
        (cells,) = tables.curves_table([CURVES]).rows

        # two evaluations: the first stands for the first half, the second for the rest
        assert cells == ("work", *["1.50"] * 4, "5.00", "5.00", "3.00 / 7.00")

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
        assert tables.curves_from(json.loads(json.dumps(CURVES.as_json()))) == CURVES


class TestProvenance:
    @pytest.mark.parametrize(
        ("commits", "said"),
        [
            ("a b c", "Measured on 1111111"),
            ("a b | c", "Measured on 1111111 (a, b) and 2222222 (c)"),
            ("a b c | d e f", "Measured on 1111111 (a to c) and 2222222 (d to f)"),
            ("a | b | c", "Measured on 1111111 (a), 2222222 (b) and 3333333 (c)"),
        ],
    )
    def test_rows_are_told_by_commit(self, commits, said):
        parts = enumerate(commits.split(" | "), 1)

        assert (
            tables.provenance({row: f"{n}" * 7 for n, rows in parts for row in rows.split()})
            == said
        )

    def test_rows_of_one_commit_need_not_follow_each_other(self):
        commits = dict.fromkeys("abcdefg", "1111111") | {"d": "2222222"}

        assert tables.provenance(commits) == "Measured on 1111111 (a to c, e to g) and 2222222 (d)"

    def test_rows_of_an_unknown_commit_are_named_separately(self):
        said = "Measured on an unknown commit (a) and 1111111 (b)"

        assert tables.provenance({"a": None, "b": "1111111"}) == said

    @pytest.mark.parametrize("commits", [{}, {"a": None, "b": None}])
    def test_where_no_commit_is_known_nothing_is_said(self, commits):
        assert tables.provenance(commits) is None

    def test_the_mark_of_changes_is_explained(self):
        said = tables.provenance({"a": "1111111+"})

        assert said == "Measured on 1111111+; + means with uncommitted changes"


class TestCommit:
    @pytest.fixture
    def checkout(self, tmp_path):
        for name in ("src/code.py", "benchmarks/results/run.json", "docs/page.md"):
            (tmp_path / name).parent.mkdir(parents=True)
            (tmp_path / name).write_text("as it was")
        for words in ("init -q", "add .", "commit -q -m first"):
            who = ["-c", "user.name=x", "-c", "user.email=x@x"]
            subprocess.run(["git", *who, *words.split()], cwd=tmp_path, check=True)
        return tmp_path

    def test_it_is_cut_short(self, checkout):
        head = ["git", "rev-parse", "HEAD"]
        whole = subprocess.run(head, cwd=checkout, check=True, capture_output=True, text=True)

        assert machine.commit(checkout, checkout / "src/code.py") == whole.stdout[:7]

    def test_changed_code_is_marked(self, checkout):
        code = checkout / "src/code.py"
        clean = machine.commit(checkout, code)

        code.write_text("changed")

        assert machine.commit(checkout, code) == f"{clean}+"

    def test_what_benchmarks_write_themselves_is_no_change(self, checkout):
        code = checkout / "src/code.py"
        clean = machine.commit(checkout, code)

        for name in ("benchmarks/results/run.json", "docs/page.md", "untracked.txt"):
            (checkout / name).write_text("measured")

        assert machine.commit(checkout, code) == clean

    def test_there_is_none_outside_of_a_checkout_or_for_other_code(self, checkout, tmp_path):
        inside = checkout / "copy"
        (inside / "src").mkdir(parents=True)

        assert machine.commit(inside, inside / "src/code.py") is None
        assert machine.commit(checkout, checkout / ".venv/code.py") is None


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


MACHINE = {
    "processor": "Abacus",
    "cores": 2,
    "memory_bytes": 2**34,
    "system": "Linux 1",
    "python": "3.11.0",
    "packages": {"envfleet": "1.0"},
    "load_before": 0.0,
}
EMPTY: dict[str, list] = {"lines": [], "entries": [], "notes": [], "curves": []}
RESULT = {
    "pace": {"rounds": 60, "seconds": 0.125, "seeds": 1, "part": 1.0},
    "quick": False,
    "machine": MACHINE,
    "rows": {
        "cartpole": {
            **EMPTY,
            "lines": [LINES[0].as_json()],
            "entries": [entry.as_json() for entry in ENTRIES],
            "notes": ["auto chose: well"],
        }
    },
}


class TestCommand:
    def test_fills_in_an_earlier_run(self, tmp_path, capsys):
        (tmp_path / "run.json").write_text(json.dumps(RESULT))
        readme = tmp_path / "README.md"
        readme.write_text("# x\n<!-- table:vector -->\n<!-- /table -->\n")

        code = vector.main(["--from", str(tmp_path / "run.json"), "--write", str(readme)])

        shown = capsys.readouterr().out
        assert code == 0
        for part in (
            "13.3x",
            "60 interleaved rounds of 0.125 s",
            "2 cores of Abacus, 16 GB",
            "envfleet 1.0",
            "python benchmarks/vector.py --rows cartpole",
        ):
            assert part in readme.read_text()
            assert part in shown

    @pytest.mark.parametrize(("extra", "code"), [([], 1), (["--quick"], 0)])
    def test_a_missed_target_is_an_exit_code_unless_quick(self, tmp_path, capsys, extra, code):
        missed = {**RESULT, "rows": {"x": {**EMPTY, "lines": [LINES[1].as_json()]}}}
        (tmp_path / "run.json").write_text(json.dumps(missed))

        assert vector.main(["--from", str(tmp_path / "run.json"), *extra]) == code
        assert "1 of 1 targets missed" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["--rows", "cartpole,nonsense"], "no row nonsense"),
            (["--quick", "--write", "x.md"], "needs a full run"),
            (["--rounds", "0"], "must be more than 0"),
            (["--seeds", "3"], "unrecognized arguments: --seeds 3"),
        ],
    )
    def test_misuse_is_one_sentence(self, arguments, reason, capsys):
        with pytest.raises(SystemExit, match="2"):
            vector.main(arguments)

        assert reason in capsys.readouterr().err

    @pytest.mark.parametrize(
        "rows",
        [
            vector_rows.ROWS,
            ppo_rows.ROWS,
            state_manager_rows.ROWS,
            multiagent_rows.ROWS,
            llm_rollout_rows.ROWS,
            cluster_rows.ROWS,
        ],
    )
    def test_every_row_says_what_it_is_about(self, rows):
        assert all(row.__doc__ for row in rows.values())


class TestRowsMeasuredAgain:
    @pytest.fixture
    def measure(self, monkeypatch, tmp_path):
        """Rows are not really measured: each one notes its name and pace."""

        def measure_in_fresh_process(suite, name, pace, title):
            return {**EMPTY, "notes": [f"{suite} {name} at {pace.seeds} x {pace.rounds}"]}

        monkeypatch.setattr(suite, "measure_in_fresh_process", measure_in_fresh_process)
        monkeypatch.setattr(machine, "facts", lambda: MACHINE)
        monkeypatch.setattr(machine, "commit", lambda: "1111111")
        return lambda *extra: ppo.main([*extra, "--json", str(tmp_path / "new" / "run.json")])

    def test_they_take_their_place_among_those_of_the_earlier_run(self, measure, tmp_path):
        measure("--rows", "hopper", "--seeds", "2")
        earlier = str(tmp_path / "new" / "run.json")

        measure("--rows", "cartpole", "--seeds", "2", "--jobs", "2", "--from", earlier)

        rows = json.loads((tmp_path / "new" / "run.json").read_text())["rows"]
        assert list(rows) == ["cartpole", "hopper"]
        assert rows["cartpole"]["notes"] == ["ppo cartpole at 2 x 16"]

    def test_results_of_several_files_are_one(self, measure, tmp_path, capsys):
        files = [tmp_path / name for name in ("hopper", "cartpole")]
        for path in files:
            measure("--rows", path.name)
            path.write_bytes((tmp_path / "new" / "run.json").read_bytes())

        measure("--from", *map(str, files))

        rows = json.loads((tmp_path / "new" / "run.json").read_text())["rows"]
        assert list(rows) == ["cartpole", "hopper"]
        measure("--rows", "hopper", "--rounds", "3")
        with pytest.raises(SystemExit, match=r"run\.json was measured at another pace"):
            measure("--from", str(files[1]), str(tmp_path / "new" / "run.json"))

    def test_not_among_those_of_another_pace_or_machine(self, measure, tmp_path, monkeypatch):
        measure("--rows", "hopper", "--seeds", "2")
        earlier = str(tmp_path / "new" / "run.json")

        with pytest.raises(SystemExit, match="at another pace, so its rows cannot be combined"):
            measure("--rows", "cartpole", "--from", earlier)
        monkeypatch.setattr(machine, "facts", lambda: {**MACHINE, "processor": "Difference Engine"})
        with pytest.raises(SystemExit, match="another machine or other versions"):
            measure("--rows", "cartpole", "--seeds", "2", "--from", earlier)
        monkeypatch.setattr(machine, "facts", lambda: {**MACHINE, "system": "Linux 1-build7"})
        measure("--rows", "cartpole", "--seeds", "2", "--from", earlier)

    def test_each_row_keeps_the_commit_it_was_measured_on(
        self, measure, tmp_path, monkeypatch, capsys
    ):
        measure("--rows", "hopper,memory")
        path = tmp_path / "new" / "run.json"
        monkeypatch.setattr(machine, "commit", lambda: "2222222")

        measure("--rows", "cartpole,memory", "--from", str(path))

        rows = json.loads(path.read_text())["rows"]
        assert {name: row["commit"] for name, row in rows.items()} == {
            "cartpole": "2222222",
            "hopper": "1111111",
            "memory": "2222222",
        }
        said = "Measured on 2222222 (cartpole, memory) and 1111111 (hopper)."
        assert said in capsys.readouterr().out.splitlines()

    def test_a_row_during_which_the_code_changed_is_marked(self, measure, tmp_path, monkeypatch):
        commits = iter(["1111111", "2222222", "2222222+", "2222222+", "2222222+", "3333333"])
        monkeypatch.setattr(machine, "commit", lambda: next(commits))

        measure("--rows", "cartpole,hopper,memory")

        rows = json.loads((tmp_path / "new" / "run.json").read_text())["rows"]
        assert [row["commit"] for row in rows.values()] == ["1111111+", "2222222+", "2222222+"]

    def test_without_a_commit_nothing_is_kept_or_said(self, measure, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(machine, "commit", lambda: None)

        measure("--rows", "hopper")

        rows = json.loads((tmp_path / "new" / "run.json").read_text())["rows"]
        assert "commit" not in rows["hopper"]
        assert "Measured on" not in capsys.readouterr().out

    def test_the_command_that_is_shown_repeats_it(self, measure, capsys):
        measure("--rows", "hopper,cartpole", "--seeds", "2", "--rounds", "3", "--jobs", "2")

        shown = capsys.readouterr().out.splitlines()[-1]
        assert shown == "python benchmarks/ppo.py --rows cartpole,hopper --rounds 3 --seeds 2"


class TestDocuments:
    @pytest.mark.parametrize(
        ("suite", "pages"),
        [
            (vector, ["README.md", "docs/performance.md"]),
            (state_manager, ["docs/performance.md"]),
            (ppo, ["docs/ppo.md"]),
            (meta, ["docs/meta-rl.md"]),
        ],
    )
    def test_their_tables_are_those_of_the_results(self, suite, pages, tmp_path):
        name = suite.__name__.rpartition(".")[2]
        copies = [tmp_path / Path(page).name for page in pages]
        for page, copy in zip(pages, copies, strict=True):
            copy.write_text((ROOT / page).read_text())

        results = str(ROOT / "benchmarks" / "results" / f"{name}.json")
        suite.main(["--from", results, "--write", *map(str, copies)])

        for page, copy in zip(pages, copies, strict=True):
            assert copy.read_text() == (ROOT / page).read_text()

    def test_the_readme_has_five_rows_and_no_targets(self):
        text = (ROOT / "README.md").read_text()
        (table,) = re.findall(r"<!-- table:vector_summary -->\n(.*?)\n\n", text, re.DOTALL)

        head, _, *lines = table.splitlines()
        assert head == "| work | against | speed-up |"
        assert len(lines) == 5

    def test_every_line_of_ppo_has_the_command_of_its_row(self, tmp_path):
        result, page = tmp_path / "run.json", tmp_path / "page.md"
        line, curves = LINES[0].as_json(), [CURVES.as_json()]
        failed = {**LINES[1].as_json(), "failure": "out of breath"}
        rows = {
            "hopper": {**EMPTY, "lines": [line], "curves": curves, "commit": "1111111"},
            "memory": {**EMPTY, "lines": [failed]},
            "overhead": {**EMPTY, "lines": [line, line]},
        }
        pace = {"rounds": 16, "seconds": 2.0, "seeds": 3, "part": 1.0}
        result.write_text(json.dumps({**RESULT, "pace": pace, "rows": rows}))
        page.write_text("<!-- table:ppo -->\n<!-- /table -->\n")

        ppo.main(["--from", str(result), "--write", str(page)])

        written = page.read_text()
        assert re.findall(r"\| `(.*)` \|$", written, re.MULTILINE) == [
            "python benchmarks/ppo.py --rows hopper --seeds 3",
            "python benchmarks/ppo.py --rows memory --seeds 3",
            "python benchmarks/ppo.py --rows overhead",
            "python benchmarks/ppo.py --rows overhead",
        ]
        said = "Measured on 1111111 (hopper) and an unknown commit (memory, overhead)."
        assert written.count(said) == 1

    def test_commands_by_hand_train_what_the_rows_do(self):
        page = (ROOT / "docs/ppo.md").read_text()
        by_hand = dict(re.findall(r"^\| (\S+) \| `envfleet (train .*)` \|$", page, re.MULTILINE))
        assert by_hand.keys() == ppo_rows.TRAINING_TASKS.keys()

        for row, task in ppo_rows.TRAINING_TASKS.items():
            words = shlex.split(by_hand[row])
            asked = read_train_args(build_parser(words).parse_args(words))

            recipe = task.recipe
            assert asked.ppo == recipe.options, row
            assert asked.options == TrainOptions(
                task.env, n_envs=recipe.n_envs, total_steps=recipe.total_steps, seed=0
            )

    def test_the_seeds_that_are_spoken_of_are_those_of_the_run_and_the_default(self, capsys):
        page = " ".join((ROOT / "docs/ppo.md").read_text().split())
        result = json.loads((ROOT / "benchmarks/results/ppo.json").read_text())
        with pytest.raises(SystemExit, match="0"):
            ppo.main(["--help"])
        shown = " ".join(capsys.readouterr().out.split())
        default = re.search(r"runs per row that learns \(default: (\d+)\)", shown)
        assert default is not None

        assert f"Without `--seeds` there are {default[1]} of each environment" in page
        assert f"this table was made by `--seeds {result['pace']['seeds']}`" in page


class TestFreshProcesses:
    def test_each_is_made_in_a_process_of_its_own_that_may_start_others(self):
        asked = "__import__('os').getpid()", "__import__('multiprocessing').current_process()"
        answers = dict(in_fresh_processes(eval, [(f"{asked[0]}, {asked[1]}.daemon",)] * 3, jobs=2))

        assert set(answers) == {0, 1, 2}
        assert len({os.getpid(), *(pid for pid, _ in answers.values())}) == 4
        assert not any(is_daemonic for _, is_daemonic in answers.values())

    def test_results_come_as_they_are_ready(self):
        asked = [("__import__('time').sleep(60)",), ("1",), ("2",)]

        answers = in_fresh_processes(eval, asked, jobs=2)

        assert [next(answers), next(answers)] == [(1, 1), (2, 2)]
        answers.close()  # ends the slow one, or the test would leave a process behind

    def test_one_that_dies_ends_the_others(self):
        asked = [("__import__('time').sleep(60)",), ("__import__('os')._exit(7)",)]

        with pytest.raises(EndedEarly, match="call 2 of 2 ended with exit code 7"):
            list(in_fresh_processes(eval, asked, jobs=2))


@pytest.mark.timeout(300)
class TestPPO:
    def test_a_run_is_looked_at_on_its_way_and_at_its_end(self):
        points = one_run(TrainingTask("CartPole-v1", RECIPES["CartPole-v1"]), seed=1, steps=600)

        assert [steps for steps, _, _ in points] == [256, 512, 768]
        assert all(mean > 5 for _, mean, _ in points)

    def test_what_a_trainer_adds_is_less_than_it_takes_and_leaves_it_where_it_was(self):
        options = PPOOptions(n_steps=16, batch_size=64, n_epochs=2)
        overhead = TrainerOverhead(Training(Workload("CartPole-v1", 8), options))
        with closing(overhead):
            overhead.open()
            trainer, steps = overhead.trainer, 0
            # again where others took the processor from the parts and not from the whole
            while not overhead.percents_added or (
                len(overhead.percents_added) < 9 and overhead.percents_added[-1] <= -100
            ):
                measured = overhead.run(0.05)
                assert measured.steps % (8 * 16) == 0
                steps += 8 * 16 + measured.steps  # one to warm up
            assert trainer.env_steps == steps
            goes_on = trainer.collect()

        assert trainer.env_steps == steps + 8 * 16
        assert -100 < max(overhead.percents_added) < 100
        assert goes_on.valid.all()

    def test_a_quick_run_measures_all_and_judges_nothing(self, tmp_path):
        out = tmp_path / "run.json"

        little = ["--rounds", "1", "--seconds", "0.01"]
        rows = ["--rows", "cartpole,cartpole-speed"]

        code = ppo.main(["--quick", *rows, *little, "--json", str(out)])

        learned, raced = json.loads(out.read_text())["rows"].values()
        assert code == 0
        assert [line["target"]["bound"] for line in learned["lines"] + raced["lines"]] == [500, 3]
        assert [line["failure"] for line in learned["lines"] + raced["lines"]] == [None, None]
        assert len(raced["entries"]) == 1 + len(sb3_ways(ppo_rows.CARTPOLE))


class TestLlmRollout:
    def test_a_quick_run_asks_the_broker_in_every_way_and_the_embedded_model(self, tmp_path):
        out = tmp_path / "run.json"
        little = ["--rounds", "1", "--seconds", "0.05", "--rows", "broker,batching"]

        code = llm_rollout.main(["--quick", *little, "--json", str(out)])

        broker, batching = json.loads(out.read_text())["rows"].values()
        lines = broker["lines"] + batching["lines"]
        assert code == 0
        assert [line["target"]["bound"] for line in lines] == [5000, 1000, 2500, 1.14]
        assert [line["failure"] for line in lines] == [None] * 4
        assert all(line["values"][0] > 0 for line in lines)

    def test_without_ragen_s_repository_only_its_own_line_fails(self, monkeypatch):
        monkeypatch.delenv("ENVFLEET_RAGEN", raising=False)

        outcome = llm_rollout_rows.ragen(Pace(rounds=1, seconds=0.01, part=0.1), Silent(), "")

        (line,), (ours,) = outcome.lines, outcome.entries
        assert "git clone" in str(line.failure)
        assert not line.is_met
        assert ours.label == "envfleet"


class TestStateManager:
    LITTLE = Pace(rounds=1, seconds=0.01, part=0.01)

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ENVFLEET_CACHE", str(tmp_path))

    def test_a_quick_run_measures_all_and_judges_nothing(self, tmp_path):
        out = tmp_path / "run.json"
        little = ["--rounds", "1", "--seconds", "0.01", "--rows", "waiting"]

        code = state_manager.main(["--quick", *little, "--json", str(out)])

        (row,) = json.loads(out.read_text())["rows"].values()
        (line,) = row["lines"]
        assert code == 0
        assert line["target"]["bound"] == 6
        assert line["values"][0] > 2  # 8 steps of 20 ms, side by side
        assert "in threads" in row["notes"][0]

    @pytest.mark.parametrize("name", ["mixed", "cpu-bound", "scale"])
    def test_rows_of_rollouts_run(self, name):
        outcome = state_manager_rows.ROWS[name](self.LITTLE, Silent(), "title")

        (line,) = outcome.lines
        assert line.failure is None
        assert line.values[0] > 0
        assert len(outcome.entries) == 2

    @pytest.mark.parametrize("name", ["sokoban-levels", "sokoban-step"])
    def test_without_a_peer_a_line_says_how_to_get_it(self, name, monkeypatch):
        monkeypatch.setattr(peer_sokoban, "find_spec", lambda name: None)

        outcome = state_manager_rows.ROWS[name](self.LITTLE, Silent(), "title")

        *others, last = outcome.lines
        assert last.failure is not None
        assert last.failure.endswith(f"run: {peer_sokoban.INSTALL}")
        assert [line.failure for line in others] == [None] * len(others)

    def test_peers_make_levels_and_steps(self):
        levels = peer_sokoban.TheirLevels()
        levels.open()
        assert levels.run(0.001).steps >= 1

    def test_its_tables_have_places_of_their_own(self, tmp_path):
        result, document = tmp_path / "run.json", tmp_path / "page.md"
        result.write_text(json.dumps(RESULT))
        names = ("state_manager", "state_manager_rates", "rates")
        document.write_text("".join(f"<!-- table:{name} -->\n<!-- /table -->\n" for name in names))

        state_manager.main(["--from", str(result), "--write", str(document)])

        mine, rates, others = document.read_text().split("<!-- /table -->\n")[:3]
        assert "| target |" in mine
        assert "| steps/s |" in rates
        assert others == "<!-- table:rates -->\n"

    def test_both_ways_play_the_same_rollouts(self):
        rollouts = Rollouts({"SimpleSokoban": 2, "Countdown": 1, "WebShop": 1}, num_turns=2)
        first, second = both_ways(rollouts)
        played = []
        for one in (first, second):
            with closing(one):
                one.open()
                counts = [one.play() for _ in range(3)]
                assert one.manager is not None
                played.append((counts, one.manager.get_rollout_states()))

        assert played[0] == played[1]
        assert played[0][0][0] == 4 + 4 + 3  # Countdown ends with its answer

    def test_a_random_shopper_searches_and_clicks_what_is_offered(self):
        recorded = Rollouts({"WebShop": 2}, num_turns=3).recorded

        first, second, _ = recorded[0][1]
        assert all(given["actions"][0].startswith("search[") for given in first)
        assert all(given["actions"][0].startswith("click[") for given in second)

    def test_a_shop_is_searched_and_weighed(self):
        # libraries weigh less while others start that share them: a shop that outweighs that
        num = 1000
        folder, built_s = built(num, Silent())
        assert built_s is not None
        assert built(num, Silent()) == (folder, None)
        searching, weighed = Searching(num), Weighed(num, num_turns=3, num_workers=1)
        with closing(searching):
            searching.open()
            searched = searching.run(0.01)
        weighed.open()
        assert not store._open  # this process must not share the catalogue's memory
        least, most = size_of(folder) / 2, 1e8
        shopped = weighed.run(0.0)
        while not least < weighed.extra_bytes[-1] < most and len(weighed.extra_bytes) < 5:
            shopped = weighed.run(0.0)  # others began or ended meanwhile

        assert searched.steps == len(searching.times_s)
        assert sum(searching.times_s) == pytest.approx(searched.seconds)
        assert shopped.steps > 4
        assert least < weighed.extra_bytes[-1] < most


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
    def test_what_is_hidden_of_cartpole_is_how_fast_it_moves(self):
        whole = gymnasium.make("CartPole-v1")
        partial = gymnasium.make("benchmarks.cartpole_no_velocity:CartPoleNoVel-v1")
        seen = [env.reset(seed=3)[0] for env in (whole, partial)]

        for _ in range(5):
            assert seen[0][[0, 2]].tolist() == seen[1].tolist()
            assert seen[1] in partial.observation_space
            seen = [env.step(1)[0] for env in (whole, partial)]

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


class TestVectorRows:
    LITTLE = Pace(rounds=1, seconds=0.01)

    def test_same_step_is_compared_with_the_limit(self):
        cartpole, ant = vector_rows.ROWS["same-step"](self.LITTLE, Silent(), "title").lines

        assert (cartpole.failure, ant.failure) == (None, None)
        assert (cartpole.target.bound, ant.target.bound) == (0.72, 0.85)

    def test_the_row_without_c_loads_no_c(self):
        outcome = vector_rows.ROWS["without-c"](self.LITTLE, Silent(), "title")

        (line,) = outcome.lines
        assert line.failure is None
        assert line.target.bound == 0.55
        assert [entry.label for entry in outcome.entries] == [
            "envfleet, step, without the C parts",
            "the limit: 2 processes, no communication",
        ]

    def test_the_row_without_c_fails_if_c_was_loaded(self, monkeypatch):
        monkeypatch.setattr(without_c, "VARIABLE", "ENVFLEET_OF_ANOTHER_NAME")

        (line,) = vector_rows.ROWS["without-c"](self.LITTLE, Silent(), "title").lines

        assert line.failure is not None
        assert "loaded its C parts" in line.failure


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


class TestScaleModel:
    COSTS = Costs(
        env_s=1e-3,
        act_s=1e-4,
        piece_s=1e-3,
        round_trip_s=2e-3,
        step_bytes=100.0,
        slot_bytes=1e3,
        weights_bytes=1e5,
        byte_s=1e-9,
    )

    def rate(self, nodes, slots=64, **costs):
        changed = replace(self.COSTS, **costs)
        return predict(changed, nodes=nodes, cores=1, slots=slots, n_steps=10).rate

    def test_one_node_takes_the_sum_of_its_costs(self):
        size = 1e5 + 64 * 1e3 + 64 * (10 * 100 + 1e3)
        seconds = 10 * (64 * 1e-3 + 1e-4) + 1e-3 + 2e-3 + size * 1e-9

        assert self.rate(1) == pytest.approx(640 / seconds)

    def test_nodes_help_until_the_driver_is_busy(self):
        assert 3.8 < self.rate(4) / self.rate(1) < 4
        # all bytes pass through it: its share does not shrink with more nodes
        busy = {"byte_s": 1e-5}
        assert self.rate(1000, 64_000, **busy) < 1.2 * self.rate(100, 6_400, **busy)

    def test_learning_is_done_once_for_all_nodes(self):
        assert self.rate(64, row_s=1e-3) < 1_000
