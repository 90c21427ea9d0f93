"""Rollouts in the forms that other programs read."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.errors import ConfigError
from envfleet.llm import EnvStateManager, load_config
from envfleet.llm.export import (
    advantages_of,
    chat_row,
    ragen_cache,
    token_runs,
    training_rows,
    write_export,
)
from envfleet.llm.inference.types import Message
from envfleet.llm.policies import make_policy
from envfleet.llm.rollout import play_rollout
from envfleet.llm.settings import read_agent_proxy
from envfleet.llm.trajectories import TrajectoryFailure
from tests.unit.llm.made_trajectories import trajectory, turn


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestAdvantages:
    def test_each_method_by_hand(self):
        played = [trajectory(i, rewards=(r,)) for i, r in enumerate((1.0, 3.0, 5.0, 5.0))]

        assert advantages_of(played, "identity") == [1.0, 3.0, 5.0, 5.0]
        assert advantages_of(played, "mean") == [-1.0, 1.0, 0.0, 0.0]
        spread = np.std([1.0, 3.0], ddof=1)
        expected = [-1 / (spread + 1e-6), 1 / (spread + 1e-6), 0.0, 0.0]
        assert advantages_of(played, "mean_std") == pytest.approx(expected)

    def test_penalties_count(self):
        fined = trajectory(0, turns=[turn(0, reward=1.0, penalty=-0.1)])

        assert advantages_of([fined], "identity") == [pytest.approx(0.9)]

    def test_extra_rewards_count(self):
        praised = trajectory(0, rewards=(1.0,), extra_rewards={"politeness": 0.5})

        assert advantages_of([praised], "identity") == [1.5]

    def test_masked_and_unfinished_ones_do_not_move_the_mean_of_their_group(self):
        played = [
            trajectory(0, rewards=(1.0,), group_size=4),
            trajectory(1, rewards=(3.0,), group_size=4),
            trajectory(2, rewards=(900.0,), group_size=4, is_masked=True),
            trajectory(3, rewards=(900.0,), group_size=4, is_done=False),
        ]

        assert advantages_of(played, "mean") == [-1.0, 1.0, None, None]

    def test_one_alone_has_none(self):
        assert advantages_of([trajectory(rewards=(4.0,))], "mean_std") == [0.0]

    def test_an_unknown_method_is_refused(self):
        with pytest.raises(ConfigError, match="identity, mean, mean_std, not 'median'"):
            advantages_of([], "median")  # type: ignore[arg-type]

    @given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
    def test_a_group_s_mean_is_zero(self, rewards):
        played = [trajectory(i, rewards=(r,), group_size=99) for i, r in enumerate(rewards)]
        found = np.array(advantages_of(played, "mean_std"), dtype=float)

        assert abs(found.mean()) < 1e-6
        assert np.all(np.isfinite(found))


class TestTokens:
    def test_turns_join_into_one_run_with_the_environment_s_tokens_masked(self):
        (run,) = token_runs(trajectory(rewards=(0.0, 1.0)))

        assert run.prompt_ids == [100, 7]
        assert run.completion_ids == [1, 2, 50, 2, 3]
        assert run.mask == [1, 1, 0, 1, 1]
        assert run.log_probs == [-0.1, -0.2, 0.0, -0.2, 3 * -0.1]
        assert (run.first_turn, run.num_turns) == (0, 2)

    def test_a_prompt_that_was_written_anew_begins_a_run_of_its_own(self):
        turns = [
            turn(0, prompt=(1, 2), answer=(3,)),
            turn(1, prompt=(1, 2, 9), answer=(4,)),  # the answer 3 is not in it
            turn(2, prompt=(1, 2, 9, 4, 5), answer=(6,)),
        ]
        first, second = token_runs(trajectory(turns=turns))

        assert (first.prompt_ids, first.completion_ids, first.mask) == ([1, 2], [3], [1])
        assert (second.prompt_ids, second.first_turn) == ([1, 2, 9], 1)
        assert (second.completion_ids, second.mask) == ([4, 5, 6], [1, 0, 1])

    @given(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 3), max_size=4),
                st.lists(st.integers(0, 3), max_size=4),
                st.booleans(),
            ),
            min_size=1,
            max_size=6,
        )
    )
    def test_every_answer_token_stands_after_the_prompt_it_was_drawn_for(self, made):
        turns = []
        so_far: tuple[int, ...] = ()
        for number, (new, answer, starts_anew) in enumerate(made):
            prompt = tuple(new) if starts_anew else (*so_far, *new)
            so_far = (*prompt, *answer)
            turns.append(turn(number, prompt=prompt, answer=tuple(answer)))
        one = trajectory(turns=turns)

        seen = []
        for run in token_runs(one):
            ids = [*run.prompt_ids, *run.completion_ids]
            mask = [0] * len(run.prompt_ids) + run.mask
            assert len(run.mask) == len(run.completion_ids) == len(run.log_probs)
            seen += [tuple(ids[: place + 1]) for place, is_drawn in enumerate(mask) if is_drawn]
        drawn = [
            (*one.generation.prompt_ids, *one.generation.token_ids[: place + 1])
            for one in turns
            for place in range(len(one.generation.token_ids))
        ]
        assert seen == drawn

    def test_an_engine_that_reports_no_tokens_is_refused_in_one_sentence(self):
        played = trajectory(env_id=5, has_tokens=False)

        with pytest.raises(ConfigError) as caught:
            token_runs(played)
        text = str(caught.value)
        assert text.startswith("turn 0 of environment 5 has no ids of the prompt and no ids of the")
        assert "never tokenised again" in text
        assert "\n" not in text

    def test_a_missing_log_probability_is_refused(self):
        odd = turn(0, prompt=(1,), answer=(2, 3))
        odd = replace(odd, generation=replace(odd.generation, log_probs=(-0.1,)))

        with pytest.raises(ConfigError, match="2 tokens and 1 log-probabilities"):
            token_runs(trajectory(turns=[odd]))


class TestRows:
    def test_a_row_by_hand(self):
        played = [trajectory(0, rewards=(0.0, 1.0)), trajectory(1, rewards=(0.0,))]
        row, _ = training_rows(played, "mean")

        assert row["input_ids"] == [100, 7, 1, 2, 50, 2, 3]
        assert row["completion_mask"] == [0, 0, 1, 1, 0, 1, 1]
        assert row["old_log_probs"] == pytest.approx([0, 0, -0.1, -0.2, 0, -0.2, -0.3])
        assert row["advantage"] == 0.5
        assert (row["model_version"], row["group_id"], row["env_id"]) == ("v3", 0, 0)

    def test_a_turn_whose_tokens_could_not_be_told_is_left_out_and_counted(self, tmp_path):
        turns = [
            turn(0, prompt=(1, 2), answer=(3,)),
            turn(1, prompt=(1, 2, 3, 4)),
            turn(2, prompt=(1, 2, 3, 4, 5, 6), answer=(7,)),
        ]
        played = [trajectory(turns=turns)]
        (row,) = training_rows(played)

        assert row["input_ids"] == [1, 2, 3, 4, 5, 6, 7]
        assert row["completion_mask"] == [0, 0, 1, 0, 0, 0, 1]
        told = write_export(played, "rows", tmp_path / "rows.jsonl")
        assert (told.num_rows, told.num_untold) == (1, 1)

    def test_masked_ones_are_left_out_even_without_tokens(self):
        lost = trajectory(1, has_tokens=False, is_masked=True)

        assert [row["env_id"] for row in training_rows([trajectory(0), lost])] == [0]


class TestConversations:
    def test_a_chat_has_every_message_in_order(self):
        row = chat_row(trajectory(3, rewards=(0.0, 1.0)))

        assert [one["role"] for one in row["messages"]] == ["user", "assistant"] * 2
        assert row["messages"][2]["content"] == "state 1"
        assert row["messages"][3]["content"] == "<think>t1</think><answer>Left</answer>"
        assert row["metadata"]["total_reward"] == 1.0
        assert row["custom_id"] == "env3-attempt0"

    def test_a_system_message_is_kept(self):
        first = turn(0, new_messages=(Message("system", "be brief"), Message("user", "go")))

        assert chat_row(trajectory(turns=[first]))["messages"][0]["role"] == "system"

    def test_a_cache_has_the_keys_that_the_manager_s_has(self):
        config = load_config("frozen_lake", ["es_manager.train.group_size=1"])
        proxy = read_agent_proxy(config)
        with EnvStateManager(config) as manager:
            tags = [tag for tag, _ in manager.settings.groups]
            theirs = play_rollout(manager, make_policy("random", tags, proxy, 0), proxy).caches[0]
        ours = ragen_cache(trajectory(rewards=(0.0,)))

        assert ours.keys() == theirs.keys()
        assert ours["history"][0].keys() == theirs["history"][0].keys()
        assert ours["history"][-1].keys() == theirs["history"][-1].keys() - {"metrics"}
        assert ours["history"][0]["llm_raw_response"].startswith("<think>t0</think>")

    def test_a_failure_is_told(self):
        failed = trajectory(failure=TrajectoryFailure(reason="timeout", error="after 60 s"))

        assert ragen_cache(failed)["failure"] == {
            "doing": "timeout",
            "error": "after 60 s",
            "turn": 1,
        }
        assert chat_row(failed)["metadata"]["failure"] == "timeout"


class TestFiles:
    played = (trajectory(0, rewards=(0.0, 1.0)), trajectory(1), trajectory(2, is_masked=True))

    def test_lines_of_json(self, tmp_path):
        path = tmp_path / "out.jsonl"

        told = write_export(self.played, "openai", path)
        assert lines_of(path) == [chat_row(one) for one in self.played]
        assert (told.num_rows, told.num_left_out) == (3, 0)

        told = write_export(self.played, "rows", path, advantage="mean")
        assert lines_of(path) == training_rows(self.played, "mean")
        assert (told.num_rows, told.num_trajectories, told.num_left_out) == (2, 2, 1)

        write_export(self.played, "ragen", path)
        assert [one["env_id"] for one in lines_of(path)] == [0, 1, 2]

    def test_a_count_says_how_many_rows_begin_in_mid_conversation(self, tmp_path):
        turns = [turn(0, prompt=(1,), answer=(2,)), turn(1, prompt=(8,), answer=(3,))]

        told = write_export([trajectory(turns=turns)], "rows", tmp_path / "out.jsonl")

        assert (told.num_rows, told.num_trajectories, told.num_cut) == (2, 1, 1)

    @pytest.mark.leaves_thread("tqdm, which datasets uses, keeps a thread of its own")
    @pytest.mark.parametrize("form", ["parquet", "datasets"])
    def test_tables_hold_the_same_rows(self, tmp_path, form):
        path = tmp_path / "out"
        write_export(self.played, form, path)
        if form == "parquet":
            import pyarrow.parquet

            found = pyarrow.parquet.read_table(path).to_pylist()
        else:
            import datasets

            found = datasets.load_from_disk(path).to_list()

        assert found == training_rows(self.played)

    def test_a_table_of_nothing_has_its_columns(self, tmp_path):
        import pyarrow.parquet

        write_export([], "parquet", tmp_path / "out")

        assert "old_log_probs" in pyarrow.parquet.read_table(tmp_path / "out").column_names

    def test_a_failed_export_leaves_the_old_file_and_nothing_else(self, tmp_path):
        path = tmp_path / "out.jsonl"
        path.write_text("before")
        odd = trajectory(rewards=(float("nan"),))

        with pytest.raises(ConfigError, match="NaN"):
            write_export([trajectory(1, group_size=1), odd], "rows", path, advantage="identity")
        assert path.read_text() == "before"
        assert list(tmp_path.iterdir()) == [path]

    def test_a_dataset_never_replaces_a_folder(self, tmp_path):
        with pytest.raises(ConfigError, match="exists already"):
            write_export(self.played, "datasets", tmp_path)

    def test_a_path_that_cannot_be_written_is_one_sentence(self, tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be written: No such file"):
            write_export(self.played, "openai", tmp_path / "nowhere" / "out.jsonl")

    def test_an_unknown_form_is_refused(self, tmp_path):
        with pytest.raises(ConfigError, match="openai, ragen, rows, parquet, datasets, not 'csv'"):
            write_export(self.played, "csv", tmp_path / "out")  # type: ignore[arg-type]
