"""The scripts in examples/, as they are called."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(*words, folder, code=0):
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        env=os.environ | {"COLUMNS": "100"},
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_the_self_test_passes_here(tmp_path):
    printed = run(EXAMPLES / "test_parallel_env.py", folder=tmp_path).stdout

    last = ["✅ ALL TESTS PASSED!", "🎉 All tests completed successfully!"]
    assert printed.splitlines()[-2:] == last


BREAK = """
import runpy, sys
import envfleet

whole = envfleet.make_vec

def with_another_seed(*args, **options):
    envs = whole(*args, **options)
    if options["backend"] == "process":
        reset = envs.reset
        envs.reset = lambda *, seed: reset(seed=seed + 1)
    return envs

envfleet.make_vec = with_another_seed
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_the_manager_s_self_test_passes_here(tmp_path):
    printed = run("-W", "error", EXAMPLES / "test_multiprocessing_es_manager.py", folder=tmp_path)

    *checks, last = printed.stdout.splitlines()
    assert len(checks) == 4
    assert all(" ok  " in line for line in checks)
    assert last == "✅ ALL TESTS PASSED!"


SMALL = ("es_manager.train.env_groups=2", "es_manager.train.env_configs.n_groups=[2]")


def test_sequential_and_parallel_rollouts_are_compared(tmp_path):
    words = ("--config-name", "base-parallel", *SMALL, "es_manager.train.group_size=2")
    script = EXAMPLES / "test_parallel_rollout.py"
    printed = run("-W", "error", script, *words, folder=tmp_path).stdout

    assert "sequential       lockstep" in printed
    assert "loky: trajectories are equal" in printed
    assert "fleet: metrics equal: True" in printed
    assert re.search(r"fallback: none  requests that failed: [1-9]", printed)
    assert "failing requests: trajectories are equal" in printed
    assert printed.splitlines()[-1].startswith("✅ equal; parallel is ")


def test_a_training_loop_gets_rollouts_and_advantages(tmp_path):
    words = ("--config-name", "base-parallel", *SMALL, "llm.engine=scripted")
    backend = "agent_proxy.parallel_backend=auto"
    printed = run("-W", "error", EXAMPLES / "train.py", *words, backend, folder=tmp_path).stdout

    first, second, last = printed.splitlines()
    assert first.startswith("iteration 1: 32 trajectories from seed 10000, mean reward ")
    assert second.startswith("iteration 2: 32 trajectories from seed 10002, mean reward ")
    assert "bound: " in last


BREAK_A_WORKER = """
import runpy, sys
from envfleet.llm import remote

step = remote.RemoteEnv.step

def changes_a_reward(env, action):
    *rest, info = step(env, action)
    actions, num_valid, reward, *more = info["reply"]
    return (*rest, info | {"reply": (actions, num_valid, reward + 1e-9, *more)})

remote.RemoteEnv.step = changes_a_reward
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("optimise", [(), ("-O",)], ids=["plain", "optimised"])
def test_the_manager_s_self_test_fails_loudly(optimise, tmp_path):
    (tmp_path / "broken.py").write_text(BREAK_A_WORKER)
    script = EXAMPLES / "test_multiprocessing_es_manager.py"

    done = run(*optimise, "broken.py", script, folder=tmp_path, code=1)

    assert "1 workers change the rollout" in done.stderr
    assert "PASSED" not in done.stdout


@pytest.mark.parametrize("optimise", [(), ("-O",)], ids=["plain", "optimised"])
def test_the_self_test_fails_loudly(optimise, tmp_path):
    (tmp_path / "broken.py").write_text(BREAK)

    done = run(*optimise, "broken.py", EXAMPLES / "test_parallel_env.py", folder=tmp_path, code=1)

    assert "start method fork changes the results" in done.stderr
    assert "PASSED" not in done.stdout


@pytest.mark.parametrize("name", ["test_parallel_env.py", "test_multiprocessing_es_manager.py"])
def test_the_self_test_is_no_test_of_pytest(name, tmp_path):
    words = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", EXAMPLES)

    done = run(*words, EXAMPLES / name, folder=tmp_path, code=5)

    assert "no tests collected" in done.stdout


def test_training_as_a_script_takes_one_environment(tmp_path):
    words = ("--num-episodes", 10, "--hidden", 8, "--n-epochs", 1)

    printed = run(EXAMPLES / "train_ppo.py", *words, folder=tmp_path).stdout

    assert "Using one environment for training" in printed
    assert "   Start method: default" in printed
    assert "Sequential mode: 1 environment\nEpisode 10/10\n" in printed
    assert "  |  n_envs: 1\n" in printed


def test_training_as_a_script_takes_every_flag(tmp_path):
    printed = run(
        EXAMPLES / "train_ppo.py",
        *("--n-envs", 8, "--num-episodes", 2, "--device", "cpu", "--learning-rate", "3e-4"),
        *("--checkpoint-dir", "checkpoints/parallel_v1", "--parallel-start-method", "spawn"),
        *("--seed", 7),
        folder=tmp_path,
    ).stdout

    assert "Using 8 parallel environments for training\n   Start method: spawn\n" in printed
    assert "Parallel mode: 8 environments\nEpisode 2/2\n" in printed
    kept = json.loads((tmp_path / "checkpoints/parallel_v1/run.json").read_text())
    assert kept["ppo"]["learning_rate"] == 3e-4
    asked = {"n_envs": 8, "num_episodes": 2, "device": "cpu", "seed": 7}
    assert asked.items() <= kept["options"].items()
    assert (tmp_path / "checkpoints/parallel_v1/latest.pt").exists()


def test_training_as_a_script_leaves_a_file_s_word_alone(tmp_path):
    (tmp_path / "run.yaml").write_text("env: CartPole-v1\nn_envs: 2\nnum_episodes: 1\nhidden: 8\n")

    run(EXAMPLES / "train_ppo.py", "--config", "run.yaml", "--backend", "serial", folder=tmp_path)

    kept = json.loads((tmp_path / "runs/CartPole-v1-seed0/run.json").read_text())
    assert kept["options"]["n_envs"] == 2


@pytest.mark.parametrize("num_envs", [1, 2])
def test_the_grid_world_learns_in_one_run(num_envs, tmp_path):
    words = ("--steps", 64, "--num-envs", num_envs)

    printed = run(EXAMPLES / "custom_env_main.py", *words, folder=tmp_path).stdout

    assert "total_timesteps | 64" in " ".join(printed.split())
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
    assert [path.name for path in (tmp_path / "videos").iterdir()] == ["rl-video-step-0.mp4"]
    assert (tmp_path / "ppo_grid_world.zip").exists()


def test_two_opponents_learn(tmp_path):
    words = ("--steps", 100, "--num-envs", 2)

    printed = run(EXAMPLES / "simple_push_v3_train.py", *words, folder=tmp_path).stdout

    assert printed.startswith("50 steps, mean reward: adversary_0 ")
    assert printed.splitlines()[-1].startswith("100 steps, mean reward: adversary_0 ")
