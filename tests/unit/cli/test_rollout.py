"""``envfleet rollout`` and ``envfleet verify llm``: what they read, print, write and refuse."""

import json
from typing import Any

import pytest

from envfleet.cli import main
from envfleet.cli.rollout import sample_lines
from tests.unit.llm import games

SMALL = (
    "es_manager.use_multiprocessing=false",
    "es_manager.train.env_groups=2",
    "es_manager.train.group_size=2",
    "es_manager.train.env_configs.n_groups=[2]",
)
CLIMB = """\
es_manager:
  use_multiprocessing: false
  train: &block
    env_groups: 3
    group_size: 2
    env_configs: {{tags: [Climb, Other], n_groups: [2, 1]}}
  val: *block
custom_envs:
  Climb: {{env_type: "{climb}", max_actions_per_traj: 5}}
  Other: {{env_type: picture, max_actions_per_traj: 5}}
"""


@pytest.fixture
def mine(tmp_path):
    """A configuration of one's own, with an environment that nobody has registered."""

    def write(climb="tests.unit.llm.games:Climb"):
        path = tmp_path / "mine.yaml"
        path.write_text(CLIMB.format(climb=climb))
        return str(path)

    games.register()
    return write


def printed(capsys, *words, code=0):
    assert main([*words]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out


def document(capsys, *words, code=0):
    return json.loads(printed(capsys, *words, "--json", code=code))


class TestRollout:
    def test_a_preset_by_name_with_changes(self, capsys):
        found = document(capsys, "rollout", "--config-name", "bandit", *SMALL)
        assert found["ok"] is True
        assert (found["num_envs"], found["num_turns"], found["seed"]) == (4, 4, 10000)
        assert found["plan"] == ["Bandit: in this process, as asked"]
        (bandit,) = found["tags"]
        assert (bandit["tag"], bandit["num_envs"], bandit["num_failures"]) == ("Bandit", 4, 0)
        assert found["metrics"]["Bandit/num_actions"] == bandit["num_actions"]

    def test_the_same_seed_gives_the_same_rollout(self, capsys, tmp_path):
        texts = []
        for number, seed in enumerate((7, 7, 8)):
            out = tmp_path / f"{number}.jsonl"
            words = ("--config-name", "frozen_lake", "--seed", str(seed), "--out", str(out))
            printed(capsys, "rollout", *words, *SMALL)
            texts.append(out.read_text())
        assert texts[0] == texts[1] != texts[2]

    def test_every_environment_is_a_line_of_the_file(self, capsys, mine, tmp_path):
        out = tmp_path / "rollout.jsonl"
        text = printed(capsys, "rollout", "--config-name", mine(), "--out", str(out))
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert [line["env_id"] for line in lines] == list(range(6))
        assert "Climb/success" in lines[0]["metrics"]
        assert f"Every environment's rollout is a line of {out}." in " ".join(text.split())

    def test_the_table_lines_up(self, capsys, mine):
        lines = printed(capsys, "rollout", "--config-name", mine(), "--policy", "first").split("\n")
        head = next(line for line in lines if line.startswith("tag "))
        rows = [line for line in lines if line.startswith(("Climb  ", "Other  "))]
        assert head.split() == [
            *("tag", "environments", "success", "mean", "reward", "actions", "turns", "penalty")
        ]
        assert len(rows) == 2
        assert {len(row) for row in rows} == {len(head)}
        assert rows[0].split()[:3] == ["Climb", "4", "100%"]
        assert max(map(len, lines)) <= 100
        assert "Climb: in this process, as asked" in lines
        assert "    turn 1, 5 actions left" in lines
        assert any("turns in" in line for line in lines)

    def test_words_may_stand_between_flags(self, capsys):
        first, *rest = SMALL
        found = document(
            capsys, "rollout", first, "--config-name", "bandit", *rest, "--seed", "3", "seed.val=1"
        )
        assert found["changes"] == [*SMALL, "seed.val=1"]

    def test_validation_has_its_own_block(self, capsys, mine):
        found = document(capsys, "rollout", "--config-name", mine(), "--mode", "val")
        assert (found["mode"], found["seed"]) == ("val", 123)

    @pytest.mark.filterwarnings("ignore:environment .* failed in:RuntimeWarning")
    def test_an_environment_that_fails_is_named(self, capsys, mine):
        path = mine("tests.unit.cli.test_rollout:Raising")
        found = document(capsys, "rollout", "--config-name", path, code=1)
        assert found["tags"][0]["num_failures"] == 4
        text = printed(capsys, "rollout", "--config-name", path, code=1)
        assert "4 of 6 environments failed; the first, environment 0, in step: ValueError" in text

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--config-name", "bandti"), "no configuration and no file 'bandti'; did you mean"),
            (("--config-name", "bandit", "es_manager.max_worker=1"), "did you mean max_workers?"),
            (("--config-name", "bandit", "max_workers"), "a change is written key=value"),
            (("--config-name", "bandit", "agent_proxy.max_turn=0"), "agent_proxy.max_turn must be"),
            (("--policy", "rnadom"), "--policy must be one of random, first, llm; got rnadom"),
            (("--mode", "test"), "--mode must be one of train, val; got test"),
            (("--config-nam", "bandit"), "did you mean --config-name?"),
            (("--config-name", "bandit", "--out", "no/such/folder"), "--out no/such/folder cannot"),
            (("--seed", "-1"), "--seed must be a whole number, 0 or more, got -1"),
        ],
    )
    def test_mistakes_are_one_sentence(self, capsys, words, said):
        assert main(["rollout", *words]) == 2
        captured = capsys.readouterr()
        assert said in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""


class Raising(games.Climb):
    def _act(self, action: Any) -> Any:
        raise ValueError("never")


class TestSample:
    def turn(self, **more):
        return {"state": "here", "actions_left": 3, **more}

    def answered(self, state="here"):
        return self.turn(
            actions=[1], reward=-0.1, llm_response="<answer>Up</answer>"
        ) | {"state": state}  # fmt: skip

    def test_a_short_rollout_is_shown_whole(self):
        assert sample_lines({"history": [self.answered(), self.turn()]}) == [  # type: ignore[typeddict-item]
            "turn 1, 3 actions left",
            "  here",
            "  > <answer>Up</answer>",
            "  actions [1], reward -0.1",
            "in the end, 3 actions left",
            "  here",
        ]

    def test_a_long_one_is_cut(self):
        cache: Any = {"history": [self.answered("a\nb")] * 4 + [self.turn()]}
        lines = sample_lines(cache)
        assert lines[1:3] == ["  a", "  b"]
        assert lines[-1] == "and 2 more turns"

    def test_what_would_hurt_a_terminal_does_not_reach_it(self):
        cache: Any = {"history": [self.answered("\x1b[2J\r" + "x" * 1_000_000), self.turn()]}
        lines = sample_lines(cache)
        assert len(lines) < 20
        assert all(line.isprintable() and len(line) < 100 for line in lines)


class TestVerifyLlm:
    QUICK = ("--workers", "2", "--start-methods", "fork")

    def test_an_honest_configuration_passes(self, capsys, mine):
        found = document(capsys, "verify", "llm", "--config-name", mine(), *self.QUICK)
        assert found["ok"] is True
        assert {way["digest"] for way in found["ways"]} == {found["digest"]}
        assert found["conclusion"].startswith("All 9 ways gave the rollout of one loop")

    def test_what_differs_is_named(self, capsys, mine):
        path = mine("tests.unit.llm.test_verify:KnowsItsProcess")
        words = ("verify", "llm", "--config-name", path, *self.QUICK)
        found = document(capsys, *words, code=1)
        first = next(way for way in found["ways"] if not way["equal"])
        place = {"env_id": 0, "tag": "Climb", "turn": 1, "field": "state"}
        assert place.items() <= first["difference"].items()
        assert first["difference"]["expected"] != first["difference"]["got"]
        text = printed(capsys, *words, code=1)
        assert "DIFFERS" in text
        assert "environment 0 (Climb), turn 1: state is" in " ".join(text.split())

    def test_global_random_numbers_fail(self, capsys, mine):
        path = mine("tests.unit.llm.test_verify:DrawsAndTells")
        text = printed(capsys, "verify", "llm", "--config-name", path, *self.QUICK, code=1)
        assert "Climb draws from Python's global state (random.*) in step" in " ".join(text.split())

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--workers", "0"), "must be a whole number of at least 1, got 0"),
            (
                ("--start-methods", "teleport"),
                "--start-methods must be one of fork, spawn, forkserver; got",
            ),
            (("--config-name", "bandti"), "did you mean bandit?"),
        ],
    )
    def test_mistakes_are_one_sentence(self, capsys, words, said):
        assert main(["verify", "llm", *words]) == 2
        captured = capsys.readouterr()
        assert said in captured.err
        assert captured.out == ""
