"""Countdown: what an answer is worth, rows that can be solved, and files read once."""

import json
import os
import pickle
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.errors import ConfigError, MissingExtra
from envfleet.llm.environments import countdown_rows, row_files
from envfleet.llm.environments.base import AnyText
from envfleet.llm.environments.countdown import CountdownConfig, CountdownEnv
from envfleet.llm.environments.countdown_rows import (
    MAX_NUMBERS,
    Row,
    RowTable,
    generated_row,
    plus_minus_solves,
)
from envfleet.llm.registry import env_type
from tests.unit.llm.laws import HOSTILE, assert_answers_quickly, assert_episode_is_of_its_seed

seeds = st.integers(0, 2**40)
ROWS: list[dict[str, Any]] = [
    {"target": 24, "nums": [2, 3, 4]},  # only 2 * 3 * 4
    {"target": 98, "nums": [44, 19, 35]},
    {"target": 64, "nums": [63, 95, 96]},
]
SOLVABLE = ROWS[1:]


def solution(row: Row) -> str:
    """An answer of + and - only, found by trying."""
    target, nums = row
    for signs in product((1, -1), repeat=len(nums)):
        if sum(sign * number for sign, number in zip(signs, nums, strict=True)) == target:
            return "".join(
                f"{'+' if sign > 0 else '-'}{number}"
                for sign, number in sorted(zip(signs, nums, strict=True), reverse=True)
            ).removeprefix("+")
    raise AssertionError(row)


def written(folder, rows=ROWS, name="rows.jsonl"):
    path = folder / name
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return str(path)


def asked(folder, target: int, nums: list[int], **settings: Any) -> CountdownEnv:
    path = written(folder, [{"target": target, "nums": nums}])
    env = CountdownEnv(CountdownConfig(path=path, is_plus_minus_only=False, **settings))
    env.reset(seed=0)
    return env


class TestAnswers:
    @pytest.mark.parametrize(
        ("answer", "reward", "is_valid"),
        [
            ("2 * 3 * 4", 1.0, True),
            ("4*(3+2+1)", 0.0, True),  # one number too many
            ("(4 * 3) * 2 = 24", 1.0, True),
            (r"2 \times 3 \times 4", 1.0, True),
            ("2 + 3 + 4", 0.1, True),
            ("2 + 3 + 4 = 24", 0.1, True),  # a claim is not believed
            ("6 * 4", 0.0, True),
            ("3 * 4", 0.0, True),
            ("2 * 3 * 4 * 1", 0.0, True),
            ("2 * 2 * 3 * 4 / 2", 0.0, True),
            ("23 + 4", 0.0, True),
            ("24", 0.0, True),
            ("2 / (3 - 3) + 4", 0.0, False),
            ("4 / (2 - 2) * 3", 0.0, False),
            ("2 ** 3 * 4", 0.0, False),
            ("the answer is 24", 0.0, False),
            ("", 0.0, False),
        ],
    )
    def test_are_worth_what_they_are(self, tmp_path, answer, reward, is_valid):
        env = asked(tmp_path, 24, [2, 3, 4])
        said, got, terminated, truncated, info = env.step(answer)
        assert (got, terminated, truncated) == (reward, True, False)
        assert said == env.render() == f"Your answer get {reward} points."
        assert info == {
            "action_is_effective": reward > 0,
            "action_is_valid": is_valid,
            "success": reward == 1.0,
        }

    @pytest.mark.parametrize(
        ("answer", "reward"), [("7 + 7", 1.0), ("7 * 7", 0.1), ("7", 0.0), ("7 + 7 - 7", 0.0)]
    )
    def test_use_a_number_as_often_as_it_is_there(self, tmp_path, answer, reward):
        assert asked(tmp_path, 14, [7, 7]).step(answer)[1] == reward

    def test_are_exact_where_floats_are_not(self, tmp_path):
        assert asked(tmp_path, 1, [1, 3, 1, 3, 1, 3]).step("1/3 + 1/3 + 1/3")[1] == 1.0

    @pytest.mark.parametrize(
        ("nums", "answer", "reward"),
        [
            ([5, 1, 200000], "5 + 1/200000", 1.0),
            ([5, 1, 100000], "5 + 1/100000", 0.1),
            ([5, 1, 50000], "5 + 1/50000", 0.1),
        ],
    )
    def test_are_right_within_a_hundred_thousandth(self, tmp_path, nums, answer, reward):
        assert asked(tmp_path, 5, nums).step(answer)[1] == reward

    def test_scores_can_be_set(self, tmp_path):
        scores = {"score": 2, "format_score": 0}
        assert asked(tmp_path, 5, [2, 3], **scores).step("2 + 3")[1] == 2.0
        said, reward, _, _, info = asked(tmp_path, 5, [2, 3], **scores).step("2 * 3")
        assert (said, reward) == ("Your answer get 0.0 points.", 0.0)
        assert info["action_is_effective"]

    @given(seeds)
    def test_every_generated_row_has_a_right_one(self, seed):
        env = CountdownEnv()
        env.reset(seed=seed)
        _, reward, _, _, info = env.step(solution((env._target, env._nums)))
        assert (reward, info["success"]) == (1.0, True)

    @pytest.mark.parametrize("action", HOSTILE, ids=lambda action: ascii(action)[:16])
    def test_nonsense_ends_the_episode_without_a_point(self, action):
        env = CountdownEnv()
        env.reset(seed=1)
        said, reward, terminated, _, info = assert_answers_quickly(env, action)
        assert (said, reward, terminated) == ("Your answer get 0.0 points.", 0.0, True)
        assert (info["action_is_effective"], info["success"]) == (False, False)
        assert info["action_is_valid"] == (isinstance(action, str) and action == "9" * 1000)

    @given(st.text(max_size=40) | st.text("0123456789+-*/() =", max_size=40))
    def test_any_text_is_answered(self, text):
        env = CountdownEnv()
        env.reset(seed=1)
        assert assert_answers_quickly(env, text)[2]


class TestGeneratedRows:
    @given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(2, MAX_NUMBERS))
    def test_are_solved_by_plus_and_minus(self, dataset_seed, index, size):
        target, nums = row = generated_row(dataset_seed, index, (size,))
        assert plus_minus_solves(row)
        assert len(nums) == size
        assert 1 <= target <= 99
        assert all(1 <= number <= 99 for number in nums)

    def test_depend_on_seed_and_index_only(self):
        forth = [generated_row(3, index, (3, 4)) for index in range(50)]
        back = [generated_row(3, index, (3, 4)) for index in reversed(range(50))]
        assert forth == back[::-1]
        assert len(set(forth)) == 50
        assert {len(nums) for _, nums in forth} == {3, 4}
        assert {generated_row(4, index, (3, 4)) for index in range(50)}.isdisjoint(forth)

    def test_are_taken_by_seed_and_begin_again(self):
        env = CountdownEnv(CountdownConfig(max_instances=10))
        texts = [env.reset(seed=seed)[0] for seed in range(30)]
        assert texts[:10] == texts[10:20] == texts[20:]
        assert len(set(texts)) == 10

    def test_are_others_with_another_dataset_seed(self):
        one, other = CountdownEnv(), CountdownEnv(CountdownConfig(dataset_seed=1))
        assert one.reset(seed=0) != other.reset(seed=0)

    def test_are_shown_as_target_and_numbers(self):
        env = CountdownEnv()
        said, _ = env.reset(seed=5)
        target, nums = generated_row(0, 5, (3, 4))
        assert said == env.render() == f"Target: {target}, nums: {list(nums)}"


class TestPlusMinus:
    @given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(-60, 60))
    def test_is_every_choice_of_signs(self, nums, target):
        sums = {
            sum(sign * number for sign, number in zip(signs, nums, strict=True))
            for signs in product((1, -1), repeat=len(nums))
        }
        assert plus_minus_solves((target, tuple(nums))) == (target in sums)


class TestFiles:
    @pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
    def test_rows_that_plus_and_minus_solve_are_taken_in_order(self, tmp_path, name):
        env = CountdownEnv(CountdownConfig(path=written(tmp_path, name=name)))
        texts = [env.reset(seed=seed)[0] for seed in range(4)]
        assert texts == [f"Target: {row['target']}, nums: {row['nums']}" for row in SOLVABLE * 2]

    def test_all_rows_are_taken_if_told(self, tmp_path):
        config = CountdownConfig(path=written(tmp_path), is_plus_minus_only=False)
        assert CountdownEnv(config).reset(seed=3)[0] == "Target: 24, nums: [2, 3, 4]"

    def test_at_most_so_many_rows_are_read_before_the_filter(self, tmp_path):
        env = CountdownEnv(CountdownConfig(path=written(tmp_path), max_instances=2))
        assert {env.reset(seed=seed)[0] for seed in range(4)} == {"Target: 98, nums: [44, 19, 35]"}
        # The wrong row behind them is never looked at.
        path = written(tmp_path, [*ROWS, {"target": "x"}], "more.jsonl")
        CountdownEnv(CountdownConfig(path=path, max_instances=3))

    def test_are_read_once_and_shared(self, tmp_path, monkeypatch):
        path = written(tmp_path)
        num_reads = 0
        records = row_files.file_rows

        def counted(*args):
            nonlocal num_reads
            num_reads += 1
            return records(*args)

        monkeypatch.setattr(countdown_rows, "file_rows", counted)
        envs = [CountdownEnv(CountdownConfig(path=path)) for _ in range(3)]
        envs.append(CountdownEnv(CountdownConfig(path=os.path.relpath(path))))
        for env in envs:
            env.reset(seed=0)
        assert num_reads == 1
        assert len({id(env._table()) for env in envs}) == 1

    def test_stay_where_they_were_when_the_process_goes_elsewhere(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        env = CountdownEnv(CountdownConfig(path=os.path.basename(written(tmp_path))))
        monkeypatch.chdir("/")
        assert env.reset(seed=0)[0] == "Target: 98, nums: [44, 19, 35]"

    @pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
    def test_the_mark_that_some_editors_write_is_passed_over(self, tmp_path, name):
        path = Path(written(tmp_path, name=name))
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        env = CountdownEnv(CountdownConfig(path=str(path)))
        assert env.reset(seed=0)[0] == "Target: 98, nums: [44, 19, 35]"

    def test_are_read_again_when_they_changed(self, tmp_path):
        path = written(tmp_path)
        env = CountdownEnv(CountdownConfig(path=path))
        env.reset(seed=0)
        written(tmp_path, [{"target": 3, "nums": [1, 2]}])
        assert env.reset(seed=0)[0] == "Target: 3, nums: [1, 2]"

    def test_do_not_travel_with_the_environment(self, tmp_path):
        path = written(tmp_path, [{"target": n % 90, "nums": [n % 90, n, n]} for n in range(5000)])
        env = CountdownEnv(CountdownConfig(path=path))
        env.reset(seed=4000)
        assert len(pickle.dumps(env)) < 3000
        assert pickle.loads(pickle.dumps(env)).step("1") == env.step("1")

    @given(
        st.lists(
            st.tuples(
                st.integers(-(2**63), 2**63 - 1), st.lists(st.integers(0, 2**63 - 1)).map(tuple)
            )
        )
    )
    def test_a_table_gives_back_its_rows(self, rows):
        table = RowTable(rows)
        assert [table[index] for index in range(len(table))] == rows
        for index in (-1, len(rows)):
            with pytest.raises(IndexError):
                table[index]

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("no.jsonl", None, r"no\.jsonl cannot be read: No such file"),
            (
                "rows.csv",
                "target,nums",
                r"rows\.csv is none of \.json, \.jsonl, \.jsonl\.gz, \.parquet",
            ),
            ("rows.jsonl", "", r"has no rows that \+ and - alone solve"),
            ("rows.jsonl", '{"target": ' + "9" * 5000, "line 1 is no JSON object: Exceeds"),
            ("rows.jsonl", "{", "line 1 is no JSON object: Expecting property name"),
            (
                "rows.jsonl",
                '{"target": 3, "nums": [1, 2]}\n \n{',
                "rows.jsonl, line 3 is no JSON object",
            ),
            ("rows.json", "[" * 100_000, "no complete JSON list"),
            (
                "rows.json",
                '[{"target": 3, "nums": [1, 2]}, 7]',
                "item 2 of the list is no JSON obj",
            ),
            (
                "rows.json",
                '[7, {"target": 3, "nums": [1, 2]}]',
                "item 1 of the list is no JSON obj",
            ),
            ("rows.json", "[7]", "item 1 of the list is no JSON object"),
            ("rows.json", '{"target": 1}', "row 1 of "),
            ("rows.jsonl", b"\xff\xfe", "line 1 is no JSON object"),
            ("rows.jsonl", '{"target": 24, "nums": [2, 3, 4]}', "alone solve"),
            (
                "rows.jsonl",
                '{"target": 3, "nums": [1, 2]}\n7',
                "line 2 is no JSON object but a int",
            ),
            ("rows.jsonl", '{"target": 3}', "row 1 of "),
            ("rows.jsonl", '{"target": 3, "nums": []}', "1 to 12 whole"),
            ("rows.jsonl", '{"target": 3, "nums": [-1]}', "of at least 0"),
            ("rows.jsonl", '{"target": 3, "nums": [true]}', "row 1 of "),
            ("rows.jsonl", '{"target": 3.5, "nums": [1]}', "row 1 of "),
            ("rows.jsonl", '{"target": 1, "nums": [99999999999999999999]}', "row 1 of "),
            ("rows.jsonl", json.dumps({"target": 1, "nums": [1] * 13}), "row 1 of "),
        ],
    )
    def test_mistakes_are_named_before_anything_starts(self, tmp_path, name, content, said):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=said):
            CountdownEnv(CountdownConfig(path=str(path)))


class TestParquet:
    def test_without_pyarrow_the_remedy_is_named(self, tmp_path, monkeypatch):
        path = tmp_path / "rows.parquet"
        path.touch()
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(MissingExtra, match=r"pip install 'envfleet\[parquet\]'"):
            CountdownEnv(CountdownConfig(path=str(path)))

    def test_only_the_two_columns_are_read(self, tmp_path, monkeypatch):
        import pyarrow
        from pyarrow import parquet

        asked_for, read_table = [], parquet.read_table

        def read(path, columns=None):
            asked_for.append((path.name, columns))
            return read_table(path, columns=columns)

        monkeypatch.setattr(parquet, "read_table", read)
        path = tmp_path / "rows.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([{**row, "more": 1} for row in ROWS]), path)

        env = CountdownEnv(CountdownConfig(path=str(path)))

        assert env.reset(seed=1)[0] == "Target: 64, nums: [63, 95, 96]"
        assert asked_for == [("rows.parquet", ["target", "nums"])]

    def test_real_files_are_read(self, tmp_path):
        import pyarrow
        from pyarrow import parquet

        path = tmp_path / "rows.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([{**row, "more": 1} for row in ROWS]), path)
        env = CountdownEnv(CountdownConfig(path=str(path)))
        assert [env.reset(seed=seed)[0] for seed in range(2)] == [
            f"Target: {row['target']}, nums: {row['nums']}" for row in SOLVABLE
        ]
        broken = tmp_path / "broken.parquet"
        broken.write_text("no parquet")
        with pytest.raises(ConfigError, match="cannot be read"):
            CountdownEnv(CountdownConfig(path=str(broken)))


class TestEnvironment:
    def test_reads_and_is_answered_in_words(self):
        env = CountdownEnv()
        assert env.action_space == env.observation_space == AnyText()
        assert env.config.action_lookup is None

    @given(seeds, st.lists(st.sampled_from(["1 + 2", "x", None]), max_size=2))
    def test_episode_is_of_its_seed(self, seed, actions):
        assert_episode_is_of_its_seed(CountdownEnv, seed, "train", actions)

    @given(seeds, st.sampled_from(["val", "test"]))
    def test_mode_changes_nothing(self, seed, mode):
        env = CountdownEnv()
        assert env.reset(seed=seed) == env.reset(seed=seed, options={"mode": mode})

    def test_is_found_by_name(self):
        env = env_type("countdown").make({"num_numbers": [2]})
        assert isinstance(env, CountdownEnv)
        env.reset(seed=0)
        assert len(env._nums) == 2

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"action_lookup": {1: "x"}}, "free text"),
            ({"max_instances": 0}, "max_instances must be at least 1, got 0"),
            ({"dataset_seed": -1}, "dataset_seed must be at least 0, got -1"),
            ({"num_numbers": ()}, "counts from 2 to 12"),
            ({"num_numbers": (3, 13)}, "counts from 2 to 12"),
        ],
    )
    def test_mistakes_are_named(self, settings, said):
        with pytest.raises(ConfigError, match=said):
            CountdownConfig(**settings)
