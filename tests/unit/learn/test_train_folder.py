"""What a run writes into its folder, and what can be made of it afterwards."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from envfleet import errors
from envfleet.engine.incident import Incident
from envfleet.learn.load import resumed_options
from envfleet.learn.ppo import PPOOptions
from envfleet.learn.train import PPO_KIND, TrainOptions, train
from envfleet.observe import tensorboard, video, weights_and_biases
from envfleet.runs import folder as run_folder
from envfleet.runs.callbacks import RunCallback
from envfleet.runs.checkpoint import load
from envfleet.runs.folder import RunFolder
from envfleet.runs.job import RunSettings
from envfleet.runs.record import read_record, write_report
from envfleet.runs.run_file import command
from envfleet.runs.time_report import Setup
from tests.unit.learn.test_train import PPO, RUN, StopAt, metrics
from tests.unit.observe.small_disk import files_no_larger_than


def about(folder):
    return json.loads((folder / "run.json").read_text())


def curve(folder, name):
    read = EventAccumulator(str(folder))
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars(name)]


class TestFacts:
    def test_a_run_says_what_its_result_depends_on(self, tmp_path):
        train(RUN, PPO, tmp_path, StopAt(1))
        found = about(tmp_path)
        assert {"python", "envfleet", "numpy", "gymnasium", "torch"} == found["versions"].keys()
        assert {"platform", "cpu", "cores"} == found["machine"].keys()
        assert found["options"] == asdict(RUN)
        assert found["defaults"]["options"]["n_envs"] == 8
        assert found["iterations"] == 12
        assert "started" in found

    def test_mujoco_s_version_is_told_where_it_is_used(self, tmp_path):
        options = replace(RUN, env="InvertedPendulum-v5", num_episodes=1)
        train(options, PPO, tmp_path)
        assert "mujoco" in about(tmp_path)["versions"]

    def test_each_part_of_a_run_has_its_own_facts(self, tmp_path):
        train(RUN, PPO, tmp_path, StopAt(2))
        train(RUN, PPO, tmp_path, StopAt(5), is_resumed=True)
        train(RUN, PPO, tmp_path, is_resumed=True)
        found = about(tmp_path)
        assert [part["env_steps"] for part in found["resumed"]] == [128, 320]
        assert all(part["versions"] == found["versions"] for part in found["resumed"])


class TestCommand:
    @staticmethod
    def told(options=None, plain=None, ppo=None, plain_ppo=None, **more):
        of_all = {"env": "X", "total_steps": 9, "num_episodes": None}
        return command(
            PPO_KIND,
            {
                "options": of_all | (options or {}),
                "ppo": ppo or {},
                "defaults": {"options": of_all | (plain or {}), "ppo": plain_ppo or {}},
                **more,
            },
        )

    def test_it_holds_what_differs_from_the_defaults(self):
        found = self.told(
            {"env": "my pkg:X", "n_envs": 4, "video": True, "env_kwargs": {"g": 9.81}},
            {"env": "my pkg:X", "n_envs": 8, "video": False, "env_kwargs": {}},
            {"hidden": [32, 32], "orthogonal": False, "gamma": 0.99},
            {"hidden": [64, 64], "orthogonal": True, "gamma": 0.99},
        )
        assert found == (
            "envfleet train --env 'my pkg:X' --no-recipe --n-envs 4 --video "
            "--env-kwargs '{\"g\": 9.81}' --hidden 32,32 --no-orthogonal"
        )

    def test_it_says_once_how_long(self):
        found = self.told({"total_steps": 5, "num_episodes": 3})
        assert found == "envfleet train --env X --no-recipe --num-episodes 3"

    def test_a_run_that_was_made_longer_is_made_in_as_many_parts(self):
        found = self.told(
            {"total_steps": 40},
            earlier_lengths=[
                {"total_steps": 20, "num_episodes": None},
                {"total_steps": 20, "num_episodes": 3},
            ],
        )
        assert found == (
            "envfleet train --env X --no-recipe --total-steps 20 --checkpoint-dir runs/again && "
            "envfleet train --resume runs/again --num-episodes 3 && "
            "envfleet train --resume runs/again --total-steps 40"
        )

    def test_plain_options_need_no_flags(self, tmp_path):
        folder = RunFolder(tmp_path, PPO_KIND)
        options = {"options": TrainOptions("X", tensorboard=True), "ppo": PPOOptions()}
        settings = RunSettings(title="X", iterations=1, iteration_steps=1)
        folder.begin(options, settings, Setup(), identity="a")
        assert about(tmp_path)["command"] == "envfleet train --env X --no-recipe"


class TestCurves:
    NAMES = {  # noqa: RUF012
        "rollout/ep_rew_mean": "mean_return",
        "rollout/ep_len_mean": "mean_length",
        "time/fps": "env_steps_per_second",
        "train/approx_kl": "approx_kl",
        "train/clip_fraction": "clip_fraction",
        "train/explained_variance": "explained_variance",
        "train/policy_gradient_loss": "policy_loss",
        "train/value_loss": "value_loss",
        "train/learning_rate": "learning_rate",
        "eval/mean_reward": "evaluation_mean",
        "eval/std_reward": "evaluation_std",
    }

    @pytest.mark.parametrize("stops", [[], [5], [3, 7]], ids=str)
    def test_tensorboard_shows_what_the_metrics_say(self, stops, tmp_path):
        for number, stop in enumerate(stops):
            train(RUN, PPO, tmp_path, StopAt(stop), is_resumed=number > 0)
        train(RUN, PPO, tmp_path, is_resumed=bool(stops))
        for name, figure in self.NAMES.items():
            expected = [
                (line["env_steps"], pytest.approx(line[figure], rel=1e-6))
                for line in metrics(tmp_path)
                if line.get(figure) is not None
            ]
            assert curve(tmp_path, name) == expected, name
            assert len(expected) >= 3

    def test_without_the_package_a_run_says_so_and_goes_on(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
        with pytest.warns(RuntimeWarning, match=r"tensorboard is not installed.*envfleet\[train\]"):
            outcome = train(RUN, PPO, tmp_path)
        assert outcome.env_steps == 768
        assert not list(tmp_path.glob("events*"))

    def test_it_is_left_out_on_request(self, tmp_path):
        train(replace(RUN, tensorboard=False), PPO, tmp_path, StopAt(1))
        assert not list(tmp_path.glob("events*"))

    def test_packages_that_were_asked_for_are_missed_before_anything_starts(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(weights_and_biases, "find_spec", lambda name: None)
        monkeypatch.setattr(video, "find_spec", lambda name: None)
        asking = {"wandb": replace(RUN, wandb=True), "video": replace(RUN, video=True)}
        for extra, options in asking.items():
            with pytest.raises(errors.MissingExtra, match=rf"envfleet\[{extra}\]"):
                train(options, PPO, tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_weights_and_biases_goes_on_under_the_same_id(tmp_path):
    code = """
        import os, time
        from dataclasses import replace
        from pathlib import Path
        from tests.unit.learn.test_train import PPO, RUN, StopAt, train

        options = replace(RUN, wandb=True, wandb_project="here", tensorboard=False)
        train(options, PPO, Path("run"), StopAt(4))
        time.sleep(1)  # parts are named after the second they began in
        train(options, PPO, Path("run"), is_resumed=True)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"WANDB_MODE": "offline", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        timeout=100,
        check=True,
    )
    run_id = about(tmp_path / "run")["wandb_id"]
    files = [path.name for path in (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")]
    assert files == [f"run-{run_id}.wandb"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_weights_and_biases_has_one_run_of_the_main_process_beside_workers(method, tmp_path):
    code = f"""
        import os
        from dataclasses import replace
        from pathlib import Path

        import wandb
        from tests.unit.learn.test_train import PPO, RUN, KillsAWorker, train

        begin = wandb.init

        def begun(**options):
            print("begun by", os.getpid())
            return begin(**options)

        wandb.init = begun
        options = replace(RUN, backend="process", num_workers=2, parallel_start_method="{method}")
        options = replace(options, wandb=True, tensorboard=False)
        print("main is", os.getpid())
        assert train(options, PPO, Path("run"), KillsAWorker()).incidents == 1
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"WANDB_MODE": "offline", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (main,) = re.findall(r"main is (\d+)", done.stdout)
    assert re.findall(r"begun by (\d+)", done.stdout) == [main]
    run_id = about(tmp_path / "run")["wandb_id"]
    files = [path.name for path in (tmp_path / "run" / "wandb").glob("*run-*/*.wandb")]
    assert files == [f"run-{run_id}.wandb"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


class TestTimes:
    def test_seconds_add_up_to_the_run_s(self, tmp_path):
        outcome = train(RUN, PPO, tmp_path)
        noted = [line["seconds"] for line in metrics(tmp_path)]
        assert sum(noted) == pytest.approx(outcome.seconds, abs=1e-6 * len(noted))
        parts = {name for line in metrics(tmp_path) for name in line if name.startswith("seconds/")}
        told = {f"seconds/{name}" for name, share in outcome.shares.items() if share}
        assert told - parts == {"seconds/the rest"}

    def test_the_page_says_what_the_run_said(self, tmp_path):
        outcome = train(RUN, PPO, tmp_path)
        run = read_record(tmp_path, PPO_KIND)
        for name, share in outcome.shares.items():
            assert run.shares.get(name, 0.0) == pytest.approx(share, abs=1e-3)
        (named,) = (name for name in outcome.shares if f"% {name}: " in run.verdict)
        # of two that took as much either may be named
        assert outcome.shares[named] == pytest.approx(max(outcome.shares.values()), abs=1e-3)

    def test_an_iteration_tells_of_its_speed_and_its_episodes(self, tmp_path):
        class Seen(RunCallback):
            told = None

            def iterated(self, iteration):
                self.told = iteration

        seen = Seen()
        begun_s = time.monotonic()
        train(RUN, PPO, tmp_path, seen)
        took_s = time.monotonic() - begun_s
        last = seen.told
        assert last is not None
        assert last.env_steps_per_second > 64 / took_s
        assert last.mean_length == last.mean_return  # CartPole pays 1 for each step
        assert last.incidents == 0
        assert metrics(tmp_path)[-2]["env_steps"] == 768


class Fragile(gymnasium.Env):
    """Raises in the third step of episodes that begin with a small number."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.first = 0, self.np_random.uniform(size=1)
        return self.first.copy(), {}

    def step(self, action):
        self.t += 1
        if self.t == 3 and self.first < 0.2:
            raise RuntimeError(f"cannot begin with {self.first[0]:.3f}")
        return self.first.copy(), 1.0, self.t == 8, False, {}


@pytest.fixture
def fragile():
    gymnasium.register("Fragile-v0", lambda **_: Fragile())
    yield TrainOptions("Fragile-v0", n_envs=2, num_episodes=2, backend="serial", eval_episodes=1)
    del gymnasium.registry["Fragile-v0"]


def incidents(folder):
    return [json.loads(line) for line in (folder / "incidents.jsonl").read_text().splitlines()]


class TestIncidents:
    def test_each_is_a_line_and_a_file_that_happens_again(self, fragile, tmp_path):
        outcome = train(fragile, PPO, tmp_path)
        found = incidents(tmp_path)
        assert len(found) == outcome.incidents > 0
        for line in found:
            assert line["kind"] == "exception"
            assert line["env_steps"] in (32, 64)
            assert {"time", "slot", "seed", "worker", "doing"} <= line.keys()
            assert "cannot begin with" in line["reason"]
            assert Incident.load(tmp_path / line["replay"]).replay().reproduced

    def test_the_page_tells_of_them(self, fragile, tmp_path):
        outcome = train(fragile, PPO, tmp_path)
        page = outcome.report.read_text()
        assert page.count(incidents(tmp_path)[0]["reason"]) >= 1
        assert f"{tmp_path}/incidents/0001-slot" in page

    def test_a_killed_worker_is_one(self, tmp_path):
        class Kill(RunCallback):
            def begun(self, envs, start_steps):
                self.fleet = envs.fleet

            def iterated(self, iteration):
                if iteration.number == 2:
                    os.kill(self.fleet.worker_pids()[0], signal.SIGKILL)

        options = replace(RUN, backend="process", num_workers=2)
        train(options, PPO, tmp_path, Kill())
        (line,) = incidents(tmp_path)
        assert line["kind"] == "death"
        assert line["slots"] == [0, 1]
        assert (tmp_path / line["replay"]).exists()

    def test_those_of_later_parts_are_added(self, fragile, tmp_path):
        longer = replace(fragile, num_episodes=4)
        train(longer, PPO, tmp_path, StopAt(2))
        before = incidents(tmp_path)
        train(longer, PPO, tmp_path, is_resumed=True)
        assert incidents(tmp_path)[: len(before)] == before
        names = [line["replay"] for line in incidents(tmp_path)]
        assert len(set(names)) == len(names) > len(before)

    def test_endless_failures_do_not_fill_the_disk(self, fragile, tmp_path, monkeypatch):
        monkeypatch.setattr(run_folder, "KEPT_REPLAYS", 1)
        train(fragile, PPO, tmp_path)
        assert len(list((tmp_path / "incidents").iterdir())) == 1
        assert len(incidents(tmp_path)) > 1

    def test_one_whose_file_cannot_be_written_is_told_without_it(self, fragile, tmp_path):
        (tmp_path / "incidents").write_text("in the way")
        with pytest.warns(RuntimeWarning, match="cannot be replayed"):
            train(fragile, PPO, tmp_path)
        assert {line["replay"] for line in incidents(tmp_path)} == {None}

    def test_one_that_cannot_be_told_costs_a_warning(self, fragile, tmp_path):
        class InTheWay(RunCallback):
            def begun(self, envs, start_steps):
                (tmp_path / "incidents.jsonl").mkdir()

            def iterated(self, iteration):
                if iteration.number == iteration.of:
                    (tmp_path / "incidents.jsonl").rmdir()

        with pytest.warns(RuntimeWarning, match="an incident could not be kept"):
            outcome = train(fragile, PPO, tmp_path, InTheWay())
        assert outcome.env_steps == 64


class TestVideo:
    def test_every_evaluation_leaves_one(self, tmp_path):
        train(replace(RUN, video=True), PPO, tmp_path)
        evaluated = [line["env_steps"] for line in metrics(tmp_path) if "evaluation_mean" in line]
        names = sorted(path.name for path in (tmp_path / "videos").iterdir())
        assert names == [f"step_{steps:012d}.mp4" for steps in evaluated]
        assert "data:video/mp4;base64," in (tmp_path / "report.html").read_text()

    def test_a_render_mode_of_the_run_gives_way_to_the_one_of_videos(self, tmp_path):
        drawing = replace(RUN, env_kwargs={"render_mode": "rgb_array"}, video=True, eval_every=0)

        train(drawing, PPO, tmp_path)

        assert len(list((tmp_path / "videos").iterdir())) == 1

    def test_it_shows_the_evaluation_s_first_episode(self, tmp_path):
        outcome = train(replace(RUN, video=True, eval_every=0), PPO, tmp_path)
        (path,) = (tmp_path / "videos").iterdir()
        frames, _ = imageio_ffmpeg.count_frames_and_secs(path)
        assert outcome.last_evaluation is not None
        assert frames == outcome.last_evaluation.returns[0] + 1

    def test_what_cannot_be_drawn_is_said_once_and_the_run_goes_on(self, fragile, tmp_path):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            outcome = train(replace(fragile, video=True, eval_every=1), PPO, tmp_path)
        assert outcome.env_steps == 64
        about_videos = [str(one.message) for one in said if "no video" in str(one.message)]
        assert len(about_videos) == 1
        assert "rgb_array" in about_videos[0]


class TestReport:
    def test_it_is_made_again_from_two_files_alone(self, tmp_path):
        train(RUN, PPO, tmp_path / "run")
        (tmp_path / "copy" / "run").mkdir(parents=True)
        for name in ("run.json", "metrics.jsonl"):
            shutil.copy(tmp_path / "run" / name, tmp_path / "copy" / "run" / name)
        again = write_report(tmp_path / "copy" / "run", PPO_KIND).read_text()
        assert again == (tmp_path / "run" / "report.html").read_text()

    def test_a_stopped_run_has_one_that_says_how_to_go_on(self, tmp_path):
        outcome = train(RUN, PPO, tmp_path / "run", StopAt(3))
        page = outcome.report.read_text()
        assert read_record(tmp_path / "run", PPO_KIND).state == "stopped"
        assert 'class="state stopped"' in page
        assert "--resume" in page

    def test_a_failed_run_has_one_that_says_why(self, tmp_path):
        class Fails(RunCallback):
            def iterated(self, iteration):
                if iteration.number == 3:
                    raise OSError("the moon is in the way")

        with pytest.raises(OSError, match="moon"):
            train(RUN, PPO, tmp_path, Fails())
        run = read_record(tmp_path, PPO_KIND)
        assert (run.state, run.reason) == ("failed", "the moon is in the way")
        assert "the moon is in the way" in (tmp_path / "report.html").read_text()

    def test_a_run_that_was_killed_is_unfinished_and_has_one_after_it_went_on(self, tmp_path):
        train(RUN, PPO, tmp_path, StopAt(5))
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert "ended" in lines[-1]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
        (tmp_path / "report.html").unlink()
        assert read_record(tmp_path, PPO_KIND).state == "unfinished"
        train(*resumed_options(tmp_path), tmp_path, is_resumed=True)
        assert read_record(tmp_path, PPO_KIND).state == "finished"
        assert (tmp_path / "report.html").exists()

    def test_one_that_cannot_be_written_costs_a_warning(self, tmp_path):
        class InTheWay(StopAt):
            def iterated(self, iteration):
                super().iterated(iteration)
                (tmp_path / "report.html").mkdir(exist_ok=True)

        with pytest.warns(RuntimeWarning, match=r"report\.html could not be written"):
            train(RUN, PPO, tmp_path, InTheWay(2))


class TestDisk:
    """A disk that is full, as the kernel says it: by limits on the size of files."""

    @pytest.mark.parametrize("place", ["/sys/envfleet", "{tmp}/file"])
    def test_a_folder_that_cannot_be_written_to_is_found_before_an_environment_is_made(
        self, place, tmp_path
    ):
        (tmp_path / "file").write_text("")
        options = replace(RUN, env="NoSuchEnvironment-v0")
        with pytest.raises(errors.CheckpointError, match="cannot be written to"):
            train(options, PPO, Path(place.format(tmp=tmp_path)))

    def test_too_small_a_disk_is_found_before_training(self, tmp_path):
        class Never(RunCallback):
            def begun(self, envs, start_steps):
                pytest.fail("training began")

        large, said = replace(PPO, hidden=(256, 256)), r"cannot hold a checkpoint.* choose another"
        with files_no_larger_than(80_000), pytest.raises(errors.CheckpointError, match=said):
            train(RUN, large, tmp_path, Never())
        assert list(tmp_path.iterdir()) == []

    def test_metrics_that_cannot_be_written_cost_a_warning(self, tmp_path):
        class Full(RunCallback):
            def iterated(self, iteration):
                if iteration.number == 3:
                    (tmp_path / "metrics.jsonl").rename(tmp_path / "before")
                    (tmp_path / "metrics.jsonl").mkdir()

        with pytest.warns(RuntimeWarning) as said:
            outcome = train(RUN, PPO, tmp_path, Full())
        assert outcome.env_steps == 768
        texts = [str(one.message) for one in said]
        assert sum("JsonLines could not note" in text for text in texts) == 1

    def test_a_checkpoint_that_fails_is_tried_again_and_the_run_goes_on(self, tmp_path):
        class FullForAWhile(RunCallback):
            """From the fourth iteration, after which a checkpoint is due, to the sixth."""

            def iterated(self, iteration):
                if iteration.number == 4:
                    self.limit = files_no_larger_than(6_000)
                    self.limit.__enter__()
                if iteration.number == 6:
                    assert not list(tmp_path.glob("*.pt"))
                    self.limit.__exit__(None, None, None)

        options = replace(RUN, tensorboard=False, eval_every=0, save_every=64 * 4)
        with pytest.warns(RuntimeWarning) as said:
            outcome = train(options, PPO, tmp_path, FullForAWhile())
        assert outcome.env_steps == 768
        texts = [str(one.message) for one in said]
        assert sum("is tried again after every iteration" in text for text in texts) == 1
        kept = sorted(path.name for path in tmp_path.glob("step_*.pt"))
        assert kept == [f"step_{64 * number:012d}.pt" for number in (6, 10, 12)]

    def test_a_last_checkpoint_that_cannot_be_written_is_an_error(self, tmp_path):
        class Full(RunCallback):
            def iterated(self, iteration):
                if iteration.number == 12:
                    self.limit = files_no_larger_than(6_000)
                    self.limit.__enter__()

        callback = Full()
        options = replace(RUN, tensorboard=False)
        begun_s = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with pytest.raises(errors.CheckpointError, match=r"000768\.pt cannot be written"):
                    train(options, PPO, tmp_path, callback)
        finally:
            callback.limit.__exit__(None, None, None)
        assert time.monotonic() - begun_s > 1.0, "it was tried twice"
        assert load(tmp_path / "latest.pt")["iteration"] == 10

    def test_a_best_policy_whose_checkpoint_failed_is_kept_as_soon_as_it_can_be(self, tmp_path):
        class FullAtTheFirstEvaluation(RunCallback):
            def iterated(self, iteration):
                if iteration.number == 5:
                    self.limit = files_no_larger_than(6_000)
                    self.limit.__enter__()
                if iteration.number == 6:
                    self.limit.__exit__(None, None, None)

        options = replace(RUN, tensorboard=False, save_every=10_000)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(options, PPO, tmp_path, FullAtTheFirstEvaluation())
        names = {path.name for path in tmp_path.glob("*.pt")}
        assert f"step_{64 * 6:012d}.pt" in names
        assert "best.pt" in names
