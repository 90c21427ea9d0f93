"""The journal of a rollout."""

import resource
from pathlib import Path

import pytest

from envfleet.errors import JournalError
from envfleet.llm.inference.types import Generation, Message
from envfleet.llm.journal import JOURNAL_FILE, Journal, read_header, read_journal
from envfleet.llm.trajectories import Trajectory, TrajectoryFailure, TrajectoryTurn


def turn(number: int, text: str = "hé") -> TrajectoryTurn:
    return TrajectoryTurn(
        number=number,
        state="#P_",
        actions_left=3,
        new_messages=(Message("user", text),),
        prefill="<think>",
        generation=Generation(
            text=text, stop_reason="stop", token_ids=(1, 2), log_probs=(-0.5, -1.0)
        ),
        llm_response=text,
        actions=(1, "Up"),
        reward=0.1,
        penalty=-0.1,
        is_valid=False,
        info={"success": False, "list": [1, None]},
    )


def write(folder: Path, trajectories: list[Trajectory]) -> None:
    with Journal(folder, {"seed": 3}) as journal:
        for one in trajectories:
            journal.begin(one)
            for part in one.turns:
                journal.turn(one, part)
            if one.is_done:
                journal.end(one)


def trajectory(env_id: int, num_turns: int = 2, **more: object) -> Trajectory:
    turns = [turn(number) for number in range(num_turns)]
    return Trajectory(env_id=env_id, group_id=0, tag="T", seed=env_id, turns=turns, **more)  # type: ignore[arg-type]


def test_a_journal_gives_back_what_was_written(tmp_path: Path) -> None:
    failure = TrajectoryFailure(reason="env", error="no")
    done = trajectory(0, is_done=True, final_state="end", failure=failure, is_masked=True)
    done.metrics, done.extra_rewards = {"T/success": 0.0}, {"bonus": 1.5}
    going_on = trajectory(1)
    write(tmp_path, [done, going_on])
    found = read_journal(tmp_path)
    assert found.trajectories == [done, going_on]
    assert found.header["seed"] == read_header(tmp_path)["seed"] == 3
    assert found.damaged == []


def test_only_the_last_attempt_counts(tmp_path: Path) -> None:
    first, second = trajectory(0), trajectory(0, 1, attempt=1)
    write(tmp_path, [first, second])
    found = read_journal(tmp_path)
    assert found.trajectories == [second]
    assert found.earlier == [first]


@pytest.mark.parametrize("num_cut", [1, 2, 40])
def test_a_torn_last_line_is_dropped_and_then_overwritten(tmp_path: Path, num_cut: int) -> None:
    one = trajectory(0)
    write(tmp_path, [one])
    path = tmp_path / JOURNAL_FILE
    path.write_bytes(path.read_bytes()[:-num_cut])
    assert len(read_journal(tmp_path).trajectories[0].turns) == 1
    with Journal(tmp_path, {}) as journal:
        journal.turn(one, one.turns[1])
    assert read_journal(tmp_path).trajectories == [one]


def test_a_damaged_line_costs_the_later_turns_of_its_trajectory_only(tmp_path: Path) -> None:
    one, other = trajectory(0, 3, is_done=True), trajectory(1, is_done=True)
    write(tmp_path, [one, other])
    path = tmp_path / JOURNAL_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b"#P_", b"#P#")  # the second turn of the first
    path.write_bytes(b"".join(lines))
    found = read_journal(tmp_path)
    assert found.damaged == [4]
    assert [len(item.turns) for item in found.trajectories] == [1, 2]
    assert [item.is_done for item in found.trajectories] == [False, True]


def test_a_rollout_goes_on_below_a_damaged_begin_of_a_later_attempt(tmp_path: Path) -> None:
    first, second = trajectory(0, 1, is_done=True), trajectory(0, 2, attempt=1)
    write(tmp_path, [first, second])
    path = tmp_path / JOURNAL_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = b"x" + lines[4]
    path.write_bytes(b"".join(lines))
    with Journal(tmp_path, {"seed": 3}) as journal:
        assert journal.damaged == [5]
        assert journal.last_attempts == {0: 0}  # turns without a beginning are of no use
        journal.go_on({"seed": 3})
        journal.begin(second)
        for part in second.turns:
            journal.turn(second, part)
        assert list(journal.trajectories()) == [second]
    found = read_journal(tmp_path)
    assert (found.trajectories, found.damaged) == ([second], [])


def test_a_journal_can_be_read_while_it_grows(tmp_path: Path) -> None:
    one = trajectory(0)
    with Journal(tmp_path, {}) as journal:
        journal.begin(one)
        for number, part in enumerate(one.turns):
            journal.turn(one, part)
            assert len(read_journal(tmp_path).trajectories[0].turns) == number + 1


def test_stored_trajectories_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    wanted = [trajectory(number, is_done=True) for number in range(5)]
    with Journal(tmp_path, {}) as journal:
        for one in wanted:
            journal.begin(one)
            for part in one.turns:
                journal.turn(one, part)
            journal.end(one)
        stored = journal.trajectories()
        assert len(stored) == 5
        assert stored[3] == wanted[3]
        assert list(stored[1:3]) == wanted[1:3]
    with Journal(tmp_path, {}) as again:
        assert list(again.trajectories()) == wanted
        assert again.num_turns == 10


def test_nothing_is_dropped_for_its_size(tmp_path: Path) -> None:
    long = Trajectory(env_id=0, group_id=0, tag="T", seed=0, turns=[turn(0, "x" * 5_000_000)])
    write(tmp_path, [long])
    assert read_journal(tmp_path).trajectories == [long]


def test_a_full_disk_is_one_clear_error_and_costs_nothing_that_was_written(tmp_path: Path) -> None:
    one = trajectory(0, 3)
    journal = Journal(tmp_path, {})
    journal.begin(one)
    journal.turn(one, one.turns[0])
    room = (tmp_path / JOURNAL_FILE).stat().st_size + 100
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        with pytest.raises(
            JournalError, match=r"cannot be written: .*1 turns in it are safe.*--re"
        ):
            journal.turn(one, one.turns[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(read_journal(tmp_path).trajectories[0].turns) == 1
    journal.turn(one, one.turns[1])  # there is room again
    journal.close()
    assert len(read_journal(tmp_path).trajectories[0].turns) == 2
    assert read_journal(tmp_path).damaged == []


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="is not there"):
        read_journal(tmp_path)
    (tmp_path / JOURNAL_FILE).write_bytes(b"{}\n")
    with pytest.raises(JournalError, match="has no header"):
        read_header(tmp_path)
