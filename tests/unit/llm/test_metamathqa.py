"""MetaMathQA: every rule of a question, its tries and its rewards; and any action at all."""

import os
import pickle
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.errors import ConfigError, OutOfOrder
from envfleet.llm.environments.metamathqa import RIGHT, WRONG, MetaMathQAConfig, MetaMathQAEnv
from envfleet.llm.environments.word_problems import WordProblems, word_problem
from envfleet.llm.registry import env_type
from tests.gates import computes_within

DATA = Path(os.environ.get("ENVFLEET_DATA", Path(__file__).parents[3].parent / "shared" / "data"))
ROWS = [
    {"query": "What is 6 * 7?", "response": "6 * 7 = 42\nThe answer is: 42"},
    {"query": "Which is it?", "response": "The answer is: Both A\nand B"},
    {"query": "Half of one?", "response": "The answer is: \\frac{1}{2}"},
    {"query": "Why?", "response": "Nobody knows."},
]


def begun(row=0, **settings):
    """An environment that asks this question."""
    env = MetaMathQAEnv(MetaMathQAConfig(dataset_path=[ROWS[row]], **settings))
    env.reset(seed=0)
    return env


class TestEpisode:
    def test_the_question_is_what_a_player_reads(self):
        env = MetaMathQAEnv(MetaMathQAConfig(dataset_path=ROWS))
        said, info = env.reset(seed=3)
        assert said == env.render() == ROWS[env.question_index or 0]["query"]
        assert said in env.observation_space
        assert info == {}

    @pytest.mark.parametrize("seed", [0, 1, 42, 123, 10_000, 2**31 - 1])
    def test_which_question_is_drawn_from_the_seed(self, seed):
        env = MetaMathQAEnv(MetaMathQAConfig(num_problems=395_000))
        env.reset(seed=seed)
        assert env.question_index == random.Random(seed).randint(0, 394_999)

    @pytest.mark.parametrize("num_tries", [0, 1, 2, 5])
    def test_a_right_answer_is_worth_half_as_much_at_every_try(self, num_tries):
        env = begun()
        for _ in range(num_tries):
            said, reward, terminated, truncated, info = env.step("41")
            assert (said, reward, terminated, truncated) == (WRONG, 0.0, False, False)
            assert info == {"action_is_effective": True, "action_is_valid": True, "success": False}
            assert env.render() == WRONG
        said, reward, terminated, truncated, info = env.step("42")
        assert (said, reward, terminated, truncated) == (RIGHT, 0.5**num_tries, True, False)
        assert info == {"action_is_effective": True, "action_is_valid": True, "success": True}
        assert env.render() == RIGHT

    def test_a_right_answer_after_very_many_tries_is_worth_nothing(self):
        env = begun()
        for _ in range(1200):
            env.step("?")
        _, reward, terminated, _, info = env.step("42")
        assert (reward, terminated, info["success"]) == (0.0, True, True)

    def test_what_is_no_text_or_empty_is_not_valid(self):
        nothing = {"action_is_effective": False, "action_is_valid": False, "success": False}
        env = begun()
        actions: tuple[object, ...] = ("", "  \n", None, 42, 3.5, {}, ["42"], b"42", 10**5000)
        for action in actions:
            assert env.step(action) == (WRONG, 0.0, False, False, nothing)

    def test_white_space_and_case_do_not_count(self):
        assert begun(1).step("both a and B")[2]
        assert begun(1).step(" BOTH\nAANDB ")[2]

    def test_a_question_without_an_answer_is_never_solved(self):
        env = begun(3)
        assert env.correct_answer is None
        for answer in ("Nobody knows.", "None", "", "none"):
            assert env.step(answer)[4]["success"] is False

    @pytest.mark.parametrize(
        ("scoring", "right"),
        [
            ("exact", [r"\frac{1}{2}"]),
            ("numeric", [r"\frac{1}{2}", "0.5", "50%", "2/4"]),
            ("symbolic", [r"\frac{1}{2}", "0.5", "50%", "2/4", r"\frac{x}{2x}", r"\sqrt{1/4}"]),
        ],
    )
    def test_how_answers_are_compared(self, scoring, right):
        said = [r"\frac{1}{2}", "0.5", "50%", "2/4", r"\frac{x}{2x}", r"\sqrt{1/4}", "1", "x"]
        assert [one for one in said if begun(2, scoring=scoring).step(one)[2]] == right

    def test_there_is_nothing_to_answer_before_and_after(self):
        env = MetaMathQAEnv()
        with pytest.raises(OutOfOrder):
            env.step("1")
        env.reset(seed=1)
        env.step(env.correct_answer)
        with pytest.raises(OutOfOrder):
            env.step("1")


class TestWhereQuestionsAreFrom:
    def test_generated_problems_by_default(self):
        env = MetaMathQAEnv()
        said, _ = env.reset(seed=5)
        problem = word_problem(0, env.question_index or 0)
        assert (said, env.correct_answer) == (problem.query, problem.answer_text)
        assert env.step(problem.answer_text)[1] == 1.0

    def test_another_generator_seed_is_another_set(self):
        said = {
            MetaMathQAEnv(MetaMathQAConfig(generator_seed=seed)).reset(seed=0)[0]
            for seed in range(5)
        }
        assert len(said) == 5

    def test_by_name_with_settings(self):
        env = env_type("metamathqa").make({"num_problems": 1, "scoring": "numeric"})
        assert env.reset(seed=9)[0] == WordProblems(0, 1)[0]["query"]

    @pytest.mark.parametrize("mode", ["train", "val", "test"])
    def test_every_mode_asks_the_same_unless_told(self, mode):
        env = MetaMathQAEnv()
        assert env.reset(seed=4, options={"mode": mode}) == env.reset(seed=4)

    def test_modes_with_shares_ask_different_questions(self):
        config = MetaMathQAConfig(num_problems=100, split_fractions=[0.8, 0.1, 0.1])
        env = MetaMathQAEnv(config)
        asked: dict[str, set[int | None]] = {}
        for mode in ("train", "val", "test"):
            asked[mode] = set()
            for seed in range(300):
                env.reset(seed=seed, options={"mode": mode})
                asked[mode].add(env.question_index)
        assert asked["train"] <= set(range(80))
        assert asked["val"] == set(range(80, 90))
        assert asked["test"] == set(range(90, 100))

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            (
                {"scoring": "fuzzy"},
                "scoring must be one of 'exact', 'numeric', 'symbolic'; got 'fuzzy'",
            ),
            ({"split_fractions": (0.5, 0.5)}, "three shares"),
            ({"split_fractions": (0.9, 0.2, -0.1)}, "add up to 1"),
            ({"dataset_path": "no.jsonl"}, "there is no file no.jsonl"),
            ({"dataset_path": []}, "the list holds no rows"),
            ({"num_problems": 0}, "at least 1"),
            ({"num_problems": 10**30}, "num_problems must be at least 1 and at most"),
        ],
    )
    def test_mistakes_are_named_when_it_is_made(self, settings, said):
        with pytest.raises(ConfigError, match=said):
            MetaMathQAEnv(MetaMathQAConfig(**settings))

    def test_a_mode_without_rows_is_named(self):
        env = MetaMathQAEnv(MetaMathQAConfig(num_problems=3, split_fractions=(1, 0, 0)))
        with pytest.raises(ConfigError, match="no row of 3 for mode 'val'"):
            env.reset(seed=0, options={"mode": "val"})

    @pytest.mark.skipif(not (DATA / "gsm8k").exists(), reason="GSM8K is not there")
    def test_gsm8k_plays(self):
        path = str(DATA / "gsm8k" / "test.jsonl")
        env = MetaMathQAEnv(MetaMathQAConfig(dataset_path=path, scoring="numeric"))
        for seed in range(50):
            said, _ = env.reset(seed=seed)
            assert len(said) > 20
            assert env.step("no number")[1] == 0.0
            assert env.step(f"${env.correct_answer}")[1] == 0.5
        assert len(pickle.dumps(env)) < 4000


class TestLaws:
    def test_one_seed_is_one_episode_without_touching_global_randomness(self):
        random.seed(5)
        before = random.getstate()
        env, other = MetaMathQAEnv(), MetaMathQAEnv()
        for seed in range(20):
            assert env.reset(seed=seed) == other.reset(seed=seed)
            assert env.correct_answer == other.correct_answer
        assert random.getstate() == before

    def test_without_a_seed_episodes_follow_the_first_seed(self):
        def three(env):
            return [env.reset(seed=1)[0], env.reset()[0], env.reset()[0]]

        assert three(MetaMathQAEnv()) == three(MetaMathQAEnv())
        assert len(set(three(MetaMathQAEnv()))) == 3

    @given(st.lists(st.sampled_from(["1", "", None, "right"]), max_size=4))
    def test_a_pickled_episode_goes_on_the_same(self, actions):
        env = MetaMathQAEnv()
        env.reset(seed=8)
        env.step("?")
        other = pickle.loads(pickle.dumps(env))
        assert other.render() == env.render()
        for action in actions:
            action = env.correct_answer if action == "right" else action
            if env._is_running:
                assert env.step(action) == other.step(action)
        assert env.reset()[0] == other.reset()[0]

    def test_a_pickled_environment_holds_no_questions(self, tmp_path):
        path = tmp_path / "many.jsonl"
        path.write_text('{"query": "What is 1 + 1?", "answer": "2"}\n' * 20_000)
        env = MetaMathQAEnv(MetaMathQAConfig(dataset_path=str(path)))
        env.reset(seed=0)
        assert len(pickle.dumps(env)) < 3000

    def test_a_relative_path_is_kept_from_where_it_was_given(self, tmp_path, monkeypatch):
        (tmp_path / "a.jsonl").write_text('{"query": "What is 1 + 1?", "answer": "2"}\n')
        monkeypatch.chdir(tmp_path)
        env = MetaMathQAEnv(MetaMathQAConfig(dataset_path="a.jsonl"))
        data = pickle.dumps(env)
        monkeypatch.chdir("/")
        assert pickle.loads(data).reset(seed=0)[0] == "What is 1 + 1?"

    @given(
        st.one_of(
            st.text(),
            st.none(),
            st.integers(),
            st.floats(),
            st.binary(),
            st.dictionaries(st.text(), st.text()),
            st.text("9*^/(){}\\ _", min_size=50),
        ),
        st.sampled_from(["exact", "numeric", "symbolic"]),
    )
    def test_any_action_is_answered(self, action, scoring):
        env = begun(scoring=scoring)
        said, reward, terminated, truncated, info = env.step(action)
        assert said in env.observation_space
        assert terminated is info["success"] is (said == RIGHT)
        assert reward == float(terminated)
        assert truncated is False
        assert info["action_is_valid"] is (isinstance(action, str) and action.strip() != "")

    @pytest.mark.parametrize("scoring", ["exact", "numeric", "symbolic"])
    def test_a_megabyte_is_answered_in_milliseconds(self, scoring):
        env = begun(2, scoring=scoring)
        for text in ("9" * 2**20, "(" * 2**20, "9**9**9", "__import__('os')", "\x00" * 2**20):
            with computes_within(0.3, text):
                assert env.step(text)[4]["success"] is False
