"""What ``verify`` compares and concludes; the comparing itself is tested with the kit."""

import io
import json

import pytest

from envfleet.cli import verify
from envfleet.cli.app import run as run_app
from envfleet.cli.screen import PlainScreen
from envfleet.cli.verify import (
    MODES,
    Comparison,
    Run,
    episodes_finding,
    runs_for,
    verify_conclusion,
)
from envfleet.testing import Difference, NoisyStream, hand_driven

RUN = Run("process", 2, "fork", "next_step")
DIFFERENCE = Difference(slot=3, step=17, field="obs", expected=1.0, got=2.0)


def test_every_backend_layout_and_mode_is_compared():
    runs = runs_for(("serial", "thread", "process"), (1, 2), ("fork", "spawn"), MODES, 5)

    assert len(runs) == len(set(runs)) == 3 * (1 + 2 + 4) + 2
    assert Run("process", 2, "spawn", "disabled") in runs
    assert Run("process", 2, "fork", "next_step", min_slots=2) in runs


def test_one_environment_has_no_order():
    assert all(one.min_slots is None for one in runs_for(("process",), (1,), ("fork",), MODES, 1))


def test_process_runs_have_deadlines():
    assert RUN.kwargs["step_timeout_s"] == RUN.kwargs["reset_timeout_s"] == 60.0
    assert Run("serial", 1, None, "disabled").kwargs == {"backend": "serial"}
    assert Run("thread", 2, None, "disabled", 1).kwargs == {
        "backend": "thread",
        "num_workers": 2,
        "min_slots": 1,
    }


class TestConclusions:
    def test_all_equal(self):
        assert verify_conclusion([Comparison(RUN, 0.1)], None, None) == (
            "All 1 runs equal the plain loop, bit by bit.",
            True,
        )

    def test_the_first_difference_is_named(self):
        text, ok = verify_conclusion(
            [Comparison(RUN, 0.1), Comparison(RUN, 0.1, DIFFERENCE)], None, None
        )

        assert not ok
        assert text == (
            "1 of 2 runs differ from the plain loop; the first (process fork, 2 workers, next_step)"
            ": slot 3, step 17, field obs."
        )

    def test_a_run_that_fails_is_no_equal(self):
        text, ok = verify_conclusion([Comparison(RUN, 0.1, error="EnvFailed: boom")], None, None)

        assert not ok
        assert "it failed with EnvFailed: boom" in text

    def test_an_env_that_does_not_repeat_itself_is_named_first(self):
        text, ok = verify_conclusion([Comparison(RUN, 0.1, DIFFERENCE)], DIFFERENCE, None)

        assert not ok
        assert text.startswith("The environment does not repeat itself")
        assert "no backend can make it reproducible" in text

    def test_global_random_state_is_the_likely_cause_of_that(self):
        text, _ = verify_conclusion(
            [Comparison(RUN, 0.1, DIFFERENCE)], DIFFERENCE, "it uses np.random."
        )

        assert text.endswith("field obs; it uses np.random.")

    def test_global_random_state_fails_even_when_all_is_equal(self):
        text, ok = verify_conclusion([Comparison(RUN, 0.1)], None, "uses np.random")

        assert not ok
        assert "others in its process share" in text


def test_where_a_loop_parts_from_itself():
    blocks = verify.verify_blocks(
        {"env": "x", "num_envs": 1, "steps": 1, "seed": 0, "episodes": {"next_step": 1}},
        [Comparison(RUN, 0.1, DIFFERENCE)],
        DIFFERENCE,
        None,
        "Conclusion.",
        ok=False,
    )
    stream = io.StringIO()
    PlainScreen(stream, width=200).show(blocks)

    assert "differ at slot 3, step 17: obs is 1.0 in one and 2.0 in the other" in stream.getvalue()
    assert stream.getvalue().count("slot 3") == 1
    assert len(verify.short("x" * 500)) < 80


def test_no_episode_is_worth_a_warning():
    assert episodes_finding({"next_step": 0, "disabled": 3}).level == "warn"
    assert episodes_finding({"next_step": 2, "disabled": 3}).text.startswith("2 ended")


def test_a_difference_is_shown_with_its_place():
    facts = {"env": "x", "num_envs": 5, "steps": 9, "seed": 0, "episodes": {"next_step": 2}}
    disabled = Run("process", 2, "fork", "disabled")
    serial = Run("serial", 1, None, "disabled")
    comparisons = [
        Comparison(RUN, 0.25),
        Comparison(disabled, 0.5, DIFFERENCE),
        Comparison(serial, 0.1, error="EnvFailed: boom"),
    ]
    stream = io.StringIO()

    blocks = verify.verify_blocks(facts, comparisons, None, None, "Conclusion.", ok=False)
    PlainScreen(stream, width=200).show(blocks)

    lines = stream.getvalue().splitlines()
    assert lines[0] == "x: 5 environments, 9 steps each, seeds from 0, against a plain loop"
    assert lines[2:6] == [
        "backend  start  workers  calls  next_step  disabled  seconds",
        "-------  -----  -------  -----  ---------  --------  -------",
        "process  fork         2  step   equal      DIFFERS      0.75",
        "serial                1  step              FAILED       0.10",
    ]
    assert any(line.startswith("bad   process fork, 2 workers, disabled  slot 3") for line in lines)
    assert any(line.endswith("EnvFailed: boom") for line in lines)
    assert lines[-1] == "Conclusion."


@pytest.fixture
def by_hand(monkeypatch):
    """A fleet that runs the plain loop: right by definition."""

    def fleet_driven(env_fn, num_envs, num_steps, seed, autoreset, **kwargs):
        return hand_driven(env_fn, num_envs, num_steps, seed, autoreset)

    monkeypatch.setattr(verify, "fleet_driven", fleet_driven)


def run(capsys, *arguments):
    code = run_app(["verify", *arguments, "--steps", "30", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_an_honest_env(by_hand, capsys):
    code, document = run(capsys, "CartPole-v1", "--workers", "1,2")

    assert code == 0
    assert document["ok"] is True
    assert all(one["equal"] for one in document["comparisons"])
    assert document["episodes"]["next_step"] > 0


def test_global_random_state_is_found(by_hand, capsys):
    code, document = run(capsys, "envfleet.testing:GlobalRandom")

    assert code == 1
    assert "np.random" in document["global_random"]


def test_what_ignores_its_seed_does_not_repeat_itself(by_hand, capsys):
    code, document = run(capsys, "envfleet.testing:IgnoresSeed")

    assert code == 1
    assert document["repeats_itself"] is False
    assert document["conclusion"].startswith("The environment does not repeat itself")


class UnseededInfo(NoisyStream):
    """What its infos hold is drawn from a space that has no seed."""

    def step(self, action):
        *answer, info = super().step(action)
        return *answer, info | {"sampled": self.action_space.sample()}


def test_infos_can_be_set_aside(by_hand, capsys):
    code, document = run(capsys, "tests.unit.cli.test_verify:UnseededInfo")
    assert code == 1
    assert document["unrepeatable"]["field"].startswith("info")

    code, document = run(capsys, "tests.unit.cli.test_verify:UnseededInfo", "--ignore-infos")
    assert code == 0, document


def test_a_backend_that_differs_is_named(monkeypatch, capsys):
    def fleet_driven(env_fn, num_envs, num_steps, seed, autoreset, **kwargs):
        wrong = kwargs["backend"] == "process"
        return hand_driven(env_fn, num_envs, num_steps, seed + wrong, autoreset)

    monkeypatch.setattr(verify, "fleet_driven", fleet_driven)

    code, document = run(capsys, "CartPole-v1", "--start-methods", "fork", "--workers", "1")

    assert code == 1
    differing = [one for one in document["comparisons"] if not one["equal"]]
    assert {one["backend"] for one in differing} == {"process"}
    assert differing[0]["difference"]["slot"] == 0
    assert differing[0]["difference"]["step"] == 0
    assert differing[0]["difference"]["field"].startswith("obs")


def test_a_backend_that_fails_is_named(monkeypatch, capsys):
    def fleet_driven(*args, **kwargs):
        raise RuntimeError("worker 0\ndied")

    monkeypatch.setattr(verify, "fleet_driven", fleet_driven)

    code, document = run(capsys, "CartPole-v1", "--backends", "serial")

    assert code == 1
    assert document["comparisons"][0]["error"] == "RuntimeError: worker 0 died"


def test_more_workers_than_environments_is_a_usage_error(capsys):
    code, document = run(capsys, "CartPole-v1", "--workers", "7,8", "--num-envs", "5")

    assert code == 2
    assert "a worker needs an environment" in document["error"]["message"]
