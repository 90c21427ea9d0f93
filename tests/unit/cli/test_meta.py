"""``envfleet meta``: what it reads, prints, writes and refuses."""

import json

import pytest

from envfleet.cli import main
from tests.unit.meta.test_runs import LEARNER, RL2

QUIET = "eval.log_tensorboard=false"


def document(capsys, *words, code=0):
    assert main(["meta", *words, "--json"]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return json.loads(captured.out)


def test_a_run_from_changes_alone_and_its_resumption(capsys, tmp_path):
    folder = str(tmp_path / "run")
    found = document(capsys, *LEARNER, QUIET, "--seed", "2", "--checkpoint-dir", folder)
    assert found["ok"] is True
    assert found["env_steps"] == (3 + 4 * 2) * 10
    assert "metrics/return_eval_episode_2" in found["metrics"]
    longer = document(capsys, "--resume", folder, "train.num_iters=5")
    assert longer["env_steps"] == found["env_steps"] + 20
    assert json.loads((tmp_path / "run" / "run.json").read_text())["run"]["seed"] == 2


def test_rl2_prints_its_figures(capsys, tmp_path):
    folder = str(tmp_path / "run")
    assert main(["meta", *RL2, QUIET, "--checkpoint-dir", folder, "--plain"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "GridNavi-v0, 2 episodes per task",
        "Iteration 3/3",
        "metrics/return_eval_episode_2",
    ):
        assert text in printed
    assert f"Thereportis{folder}/report.html" in "".join(printed.split())  # however it wraps


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--cfg", "point_robot/rl"], "did you mean point_robot/rl2"),
        (["--cfg", "point_robot/rl2", "env.nun_tasks=3"], "did you mean num_tasks"),
        ([], "no environment was named"),
        (["--cfg", "point_robot/rl2", "--trust"], "--trust goes with --resume"),
        (["--resume", "nowhere"], "holds no run"),
        (["--resume", "x", "--seed", "1"], "leave out --seed"),
        (["--resume", "x", "--cuda", "-1"], "leave out --cuda"),
        (["--cfg", "point_robot/rl2", "--cuda", "-2"], "cuda must be -1 for the CPU"),
    ],
)
def test_what_cannot_work_is_one_sentence(capsys, words, text):
    found = document(capsys, *words, code=1 if "nowhere" in words else 2)
    assert text in found["error"]["message"]


def test_a_resumed_run_keeps_what_it_depends_on(capsys, tmp_path):
    folder = str(tmp_path / "run")
    document(capsys, *LEARNER, QUIET, "--checkpoint-dir", folder)
    found = document(capsys, "--resume", folder, "train.batch_size=8", code=2)
    assert "leave out train.batch_size=8" in found["error"]["message"]
