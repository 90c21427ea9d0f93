"""``envfleet export``: what it reads, writes and refuses."""

import errno
import json

import pytest

from envfleet.cli import main
from envfleet.llm.export import FORMS
from envfleet.llm.journal import Journal
from tests.unit.llm.made_trajectories import trajectory, turn


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    cut = [turn(0, prompt=(1,), answer=(2,)), turn(1, prompt=(9,), answer=(3,))]
    with Journal(folder, {}) as journal:
        for one in (trajectory(0, turns=cut), trajectory(1, is_masked=True)):
            journal.begin(one)
            for each in one.turns:
                journal.turn(one, each)
            journal.end(one)
    return folder


def exported(capsys, *words, code=0):
    assert main(["export", *map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_rows_are_written_and_counted(capsys, run, tmp_path):
    out = tmp_path / "rows.jsonl"
    told = exported(capsys, run, "--form", "rows", "--out", out)

    assert (told["num_rows"], told["num_trajectories"]) == (2, 1)
    assert (told["num_left_out"], told["num_cut"]) == (1, 1)
    assert len(out.read_text().splitlines()) == 2


def test_people_are_told_what_is_missing_and_why(capsys, run, tmp_path):
    assert main(["export", str(run), "--form", "rows", "--out", str(tmp_path / "x")]) == 0
    said = " ".join(capsys.readouterr().out.split())

    assert "2 rows of 1 trajectory." in said
    assert "1 left out" in said
    assert "1 row begins in mid-conversation" in said


def test_a_trace_opens_in_chrome(capsys, run, tmp_path):
    out = tmp_path / "trace.json"
    told = exported(capsys, run, "--form", "trace", "--out", out)

    assert len(json.loads(out.read_text())["traceEvents"]) == told["num_rows"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--form is missing"),
        (["--form", "rows"], "--out is missing"),
        (["--form", "csv", "--out", "x"], "--form must be one of openai"),
        (["--form", "rows", "--out", "x", "--advantage", "y"], "--advantage must be one of"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(capsys, run, words, said):
    assert main(["export", str(run), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_sentence(capsys, run, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    out = tmp_path / "x"
    assert main(["export", str(run), "--form", "openai", "--out", str(out)]) in (1, 2)
    assert f"{out} cannot be written: Read-only file system" in capsys.readouterr().err


def test_a_folder_that_holds_no_rollout_is_one_sentence(capsys, tmp_path):
    words = ["export", str(tmp_path), "--form", "rows", "--out", str(tmp_path / "x")]

    assert main(words) == 1
    assert "name the folder of a rollout" in capsys.readouterr().err


@pytest.mark.leaves_thread("tqdm, which datasets uses, keeps a thread of its own")
def test_a_rollout_with_a_model_can_be_exported_in_every_form(capsys, tmp_path):
    folder = tmp_path / "played"
    small = ("es_manager.train.env_groups=2", "es_manager.train.env_configs.n_groups=[2]")
    words = ["--config-name", "frozen_lake", "--policy", "llm", "--out", str(folder)]
    more = ("llm.engine=scripted", "es_manager.train.group_size=2")
    assert main(["rollout", *words, *small, *more, "--json"]) == 0
    played = json.loads(capsys.readouterr().out)

    for form in (*FORMS, "trace"):
        told = exported(capsys, folder, "--form", form, "--out", tmp_path / form)
        assert told["num_trajectories"] == played["num_envs"] == 4
        assert told["num_left_out"] == 0
        assert (tmp_path / form).exists()
    page = (folder / "report.html").read_text()
    assert 'class="chart lanes"' in page
    assert "environment 3" in page
