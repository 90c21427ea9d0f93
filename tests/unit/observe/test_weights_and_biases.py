"""Weights & Biases without its service: what is kept, read back from its own files."""

import json
import subprocess
import sys
import time

import pytest
from wandb.proto import wandb_internal_pb2

from envfleet import errors
from envfleet.observe import weights_and_biases

SCRIPT = """
import json, sys, warnings
from pathlib import Path
from envfleet.observe.weights_and_biases import WeightsAndBiases

if __name__ == "__main__":
    steps, options = json.loads(sys.argv[2])
    sink = WeightsAndBiases(
        Path(sys.argv[1]), project="p", run_id="abc123", config={"ppo": {"gamma": 0.5}}, **options
    )
    for step in steps:
        sink.note(step, {"mean_return": step / 64, "ended": "no number"})
        sink.note(step, {"evaluation_mean": step / 32})
    sink.close()
"""


def noted(folder, steps, environment, **options):
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), json.dumps([steps, options])],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), **environment},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )


def records(path):
    """Wandb keeps its records in blocks of 32 KiB, each piece behind a head of seven bytes."""
    content, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(whole)
            yield record
            whole = b""


def runs(folder):
    """Of every part: the run it belongs to, and its points."""
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        run, points = None, {}
        for record in records(path):
            if record.HasField("run"):
                run = record.run
            if record.HasField("history"):
                items = {
                    (item.key or item.nested_key[0]): json.loads(item.value_json)
                    for item in record.history.item
                }
                step = items.pop("_step", record.history.step.num)
                points[step] = {k: v for k, v in items.items() if not k.startswith("_")}
        yield run, points


OFFLINE = {"WANDB_MODE": "offline"}


def test_a_run_that_goes_on_is_one_run_without_doubled_points(tmp_path):
    folder = tmp_path / "CartPole"
    done = noted(folder, [64, 128, 192], OFFLINE)
    assert done.stdout == ""
    time.sleep(1)  # parts are named after the second they began in
    noted(folder, [128, 192, 256], OFFLINE, noted_steps=192)
    (one, before), (other, after) = runs(folder)
    assert one.run_id == other.run_id == "abc123"
    assert (one.project, one.display_name) == ("p", "CartPole")
    assert list(before) == [64, 128, 192]
    assert list(after) == [256]
    assert before[128] == {"rollout/ep_rew_mean": 2.0, "eval/mean_reward": 4.0}
    (config,) = (item for item in one.config.update if item.key == "ppo")
    assert json.loads(config.value_json) == {"gamma": 0.5}
    assert {path.name for path in tmp_path.iterdir()} == {"CartPole"}


def test_a_service_that_cannot_be_reached_costs_a_warning(tmp_path):
    nobody = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    done = noted(tmp_path / "run", [64], nobody | {"HOME": str(tmp_path)}, patience_s=2)
    assert "Weights & Biases cannot be reached" in done.stderr
    assert "kept offline" in done.stderr
    parts = [points for _, points in runs(tmp_path / "run")]
    assert {"rollout/ep_rew_mean": 1.0, "eval/mean_reward": 2.0} in [
        point for points in parts for point in points.values()
    ]


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(weights_and_biases, "find_spec", lambda name: None)
    with pytest.raises(errors.MissingExtra, match=r"pip install 'envfleet\[wandb\]'"):
        weights_and_biases.need()
