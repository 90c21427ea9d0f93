"""Incidents: what is recorded of a failure, and that it can be repeated."""

import functools
import os
import threading

import numpy as np
import pytest
from gymnasium import spaces

from envfleet import Incident, errors
from envfleet.engine import Deadlines, Fleet, ResetPlan
from envfleet.testing import Counter, Crashing, Hanging, NoisyStream, TaskCounter
from tests.faults.stage import MODES, Resident, kill_and_wait, opened, plans, step, zeros

BACKENDS = ("serial", "thread", "process")


class Fickle(NoisyStream):
    """Fails at a random step; the message has the number that was drawn.

    So the same failure comes again only from the same state of the generator, the same options and
    the same actions, every one of them.
    """

    def __init__(self, failing_share=0.04):
        super().__init__(max_length=5)
        self.failing_share = failing_share
        self.sum, self.task = 0.0, None

    def reset(self, *, seed=None, options=None):
        self.sum, self.task = 0.0, (options or {}).get("task")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.sum += float(np.sum(action, dtype=np.float64))
        drawn = self.np_random.random()
        if drawn < self.failing_share:
            raise ValueError(f"drew {drawn}, task {self.task}, actions add up to {self.sum}")
        return super().step(action)


def step_until_it_fails(envs, seed, **reset):
    """Random actions until one raises; in disabled mode ended slots are reset without a seed."""
    generator = np.random.default_rng(seed)
    envs.reset(seed=seed, **reset)
    for _ in range(500):
        actions = generator.uniform(-1, 1, (envs.num_envs, 2)).astype(np.float32)
        _, _, terminated, truncated, _ = envs.step(actions)
        ended = terminated | truncated
        if envs.metadata["autoreset_mode"].name == "DISABLED" and ended.any():
            envs.reset(options={"reset_mask": ended, "task": 3})
    raise AssertionError("nothing failed in 500 steps")


def step_through(envs, batches):
    for actions in batches:
        envs.step(actions)


# ---- what is kept --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_incident_keeps_seed_options_and_actions_since_the_reset(backend, mode):
    env_fns = [Counter, functools.partial(Crashing, nth=4, length=None)]
    with opened(env_fns, num_workers=2, backend=backend, autoreset=mode) as envs:
        envs.reset(seed=[10, 20], options=[None, {"level": 5}])
        for action in (0, 1, 1):
            envs.step(np.array([0, action]))
        with pytest.raises(errors.EnvFailed):
            envs.step(np.array([1, 0]))
        (incident,) = envs.incidents
    assert (incident.kind, incident.slot, incident.slots) == ("exception", 1, (1,))
    assert (incident.worker, incident.doing, incident.exitcode) == (1, "step", None)
    assert (incident.seed, incident.options) == (20, {"level": 5})
    assert [int(action) for action in incident.actions] == [0, 1, 1, 0]
    assert incident.is_complete
    assert incident.reason == "RuntimeError: crashed as asked, in step number 4"
    assert "in misbehave" in incident.traceback
    assert str(incident) == (
        "exception in slot 1 (worker 1) during step, 4 actions after a reset with seed 20: "
        "RuntimeError: crashed as asked, in step number 4"
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_running_episode_is_kept(backend):
    """The reset row of next_step is no action of the new episode."""
    with opened([functools.partial(Crashing, nth=5, length=2)], backend=backend) as envs:
        envs.reset(seed=3)
        with pytest.raises(errors.EnvFailed):
            step_through(envs, ([action] for action in (0, 1, 0, 0, 1, 1, 1)))
        (incident,) = envs.incidents
    assert incident.seed is None
    assert incident.rng is not None
    # 1, 2 end an episode, reset, 1, 2 end an episode, reset, 1: the fifth step of its life
    assert [int(action) for action in incident.actions] == [1]


def test_only_the_slot_s_own_actions_are_kept():
    """Slots are sent alone, together and in any order."""
    fleet = Fleet([functools.partial(Crashing, nth=4, only_seed=1, length=None)] * 3)
    fleet.reset(plans(0, 1, 2))
    for slots, actions in (
        ([2, 1], [0, 1]),
        ([0], [1]),
        ([0, 1, 2], [1, 0, 1]),
        ([1, 0], [1, 0]),
        ([2], [1]),
    ):
        fleet.send(np.array(actions), slots)
        fleet.recv()
    fleet.send(np.array([0, 1]), [2, 1])
    with pytest.raises(errors.EnvFailed):
        fleet.recv()
    assert [int(action) for action in fleet.incidents[0].actions] == [1, 0, 1, 1]
    fleet.close()


def test_what_is_kept_is_the_journal_s_own():
    """Law 7: the caller may reuse its arrays, and its options."""
    with opened([functools.partial(Crashing, nth=3, length=None)]) as envs:
        actions, options = zeros(1), {"level": 1}
        envs.reset(seed=0, options=options)
        for value in (0, 1, 0):
            actions[:] = value
            try:
                envs.step(actions)
            except errors.EnvFailed:
                break
        actions[:] = 1
        options["level"] = 2
        (incident,) = envs.incidents
        assert [int(action) for action in incident.actions] == [0, 1, 0]
        assert incident.options == {"level": 1}


def test_incidents_of_deaths_and_silences_say_how_they_ended():
    env_fns = [Resident, functools.partial(Crashing, mode="exit", exitcode=9, nth=2, length=None)]
    with opened(env_fns, num_workers=2) as envs:
        envs.reset(seed=50)
        envs.step(zeros(2))
        with pytest.raises(errors.WorkerDied):
            envs.step(zeros(2))
        (death,) = envs.incidents
    assert (death.kind, death.exitcode, death.seed, len(death.actions)) == ("death", 9, 51, 2)
    assert "exit code 9" in str(death)
    with opened([Hanging], step_timeout_s=0.3) as envs:
        envs.reset(seed=50)
        with pytest.raises(errors.DeadlineExceeded):
            envs.step(zeros(1))
        (silence,) = envs.incidents
    assert (silence.kind, silence.exitcode, silence.seed) == ("timeout", None, 50)
    assert "misbehave" in silence.traceback


def test_every_way_to_an_incident_leads_to_the_same_one(tmp_path):
    env_fns = [functools.partial(Crashing, mode="kill", once=tmp_path / "x"), Counter, Counter]
    with opened(env_fns, num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.send(zeros(3))
        batch = envs.recv()
        (incident,) = batch.incidents
        assert envs.incidents == (incident,)
        assert incident.slots == (0, 1)
        assert list(batch.infos["incident"]) == [incident, incident, None]
        assert batch.each_info[0]["incident"] is incident


# ---- replay --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failure_after_any_number_of_autoresets_happens_again(backend, mode, tmp_path):
    """Episodes begun without a seed start from the generator's state, which is kept as well."""
    reproduced = unseeded = 0
    for seed in range(4):
        with opened([Fickle] * 3, num_workers=2, backend=backend, autoreset=mode) as envs:
            with pytest.raises(errors.EnvFailed) as caught:
                step_until_it_fails(envs, 100 * seed, options={"task": 1})
            incident = envs.incidents[0]
        file = incident.save(tmp_path / f"{seed}.incident")
        result = Incident.load(file).replay()
        assert result.reproduced, f"{incident}\n{result.exception}"
        assert result.steps == len(incident.actions)
        assert incident.reason in str(result.exception)
        assert caught.value.reason in {one.reason for one in envs.incidents}
        reproduced += 1
        unseeded += incident.seed is None
    assert reproduced == 4
    assert unseeded, "all failed in their first episode: this shows nothing of autoresets"


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_a_failure_in_an_episode_begun_by_a_queued_plan_happens_again(mode):
    env_fn = functools.partial(Fickle, failing_share=0.0)
    with opened([env_fn] * 2, num_workers=1, autoreset=mode) as envs:
        envs.reset(seed=0)
        envs.queue_reset(seed=77, options={"task": 5}, slots=[1])
        ended = 0
        while not ended:
            _, _, terminated, truncated, _ = envs.step(np.zeros((2, 2), np.float32))
            ended = terminated[1] or truncated[1]
        if mode == "next_step":
            envs.step(np.zeros((2, 2), np.float32))
        envs.set_attr("failing_share", 1.0, slots=[1])
        with pytest.raises(errors.EnvFailed, match="task 5"):
            envs.step(np.ones((2, 2), np.float32))
        (incident,) = envs.incidents
    assert (incident.seed, incident.options) == (78, {"task": 5})
    assert len(incident.actions) == 1


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_a_failure_in_the_reset_of_an_autoreset_happens_again(mode, on_failure):
    class FailsToReset(NoisyStream):
        """Draws in its reset too; a draw with a seed never fails."""

        def reset(self, *, seed=None, options=None):
            obs, info = super().reset(seed=seed, options=options)
            drawn = self.np_random.random()
            if drawn < 0.2 and seed is None:
                raise ValueError(f"drew {drawn} in reset")
            return obs, info

    with opened([FailsToReset], autoreset=mode, on_failure=on_failure) as envs:
        envs.reset(seed=3)
        for _ in range(200):
            try:
                envs.step(np.zeros((1, 2), np.float32))
            except errors.EnvFailed:
                break
            if envs.incidents:
                break
        incident = envs.incidents[0]
    assert incident.doing == "reset"
    assert incident.actions == ()
    result = incident.replay()
    assert result.reproduced, result.exception


def test_a_failure_in_the_first_reset_happens_again():
    with opened([functools.partial(Crashing, at="reset", only_seed=8)]) as envs:
        with pytest.raises(errors.EnvFailed):
            envs.reset(seed=8)
        (incident,) = envs.incidents
    assert (incident.doing, incident.seed, incident.actions) == ("reset", 8, ())
    assert incident.replay().reproduced


def test_a_failure_in_a_reset_with_other_seeds_is_not_mistaken_for_the_episode_before():
    class Picky(Counter):
        def reset(self, *, seed=None, options=None):
            if (options or {}).get("level") == 2:
                raise ValueError(f"no level 2 with seed {seed}")
            return super().reset(seed=seed, options=options)

    with opened([Picky] * 2, num_workers=1) as envs:
        envs.reset(seed=0)
        envs.step(zeros(2))
        with pytest.raises(errors.EnvFailed):
            envs.reset(seed=[5, 6], options=[None, {"level": 2}])
        (incident,) = envs.incidents
    assert (incident.slot, incident.seed, incident.options) == (1, 6, {"level": 2})
    assert incident.actions == ()
    assert incident.replay().reproduced


def test_a_restarted_episode_s_own_failure_happens_again():
    """It began with the seed of the restart."""
    with opened([Fickle], on_failure="restart") as envs:
        generator = np.random.default_rng(0)
        envs.reset(seed=4)
        while len(envs.incidents) < 4:
            envs.step(generator.uniform(-1, 1, (1, 2)).astype(np.float32))
        incidents = envs.incidents
    assert len({incident.reason for incident in incidents}) == 4
    for incident in incidents:
        result = incident.replay()
        assert result.reproduced, f"{incident}\n{result.exception}"


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2, 3), np.float32),
        spaces.MultiDiscrete([3, 4]),
        spaces.Dict({"move": spaces.Discrete(4), "say": spaces.Text(8)}),
        spaces.Tuple((spaces.Discrete(2), spaces.Sequence(spaces.Discrete(5)))),
    ],
    ids=lambda space: type(space).__name__,
)
def test_actions_of_every_kind_are_given_again_as_they_were(space):
    class Recites(Counter):
        """Fails at its third step, and says what it was given."""

        def __init__(self):
            super().__init__(length=None)
            self.action_space = space
            self.given = []

        def step(self, action):
            self.given.append(repr(action))
            if len(self.given) == 3:
                raise ValueError("; ".join(self.given))
            return super().step(action)

    with opened([Recites] * 2, num_workers=2) as envs:
        envs.action_space.seed(1)
        envs.reset(seed=0)
        with pytest.raises(errors.EnvFailed):
            step_through(envs, (envs.action_space.sample() for _ in range(3)))
        for incident in envs.incidents:
            assert incident.replay().reproduced


def test_a_replay_that_goes_well_says_so():
    class LivesInAWorker(Crashing):
        """Fails there, and not here."""

        def misbehave(self):
            if os.getpid() != here:
                super().misbehave()

    here = os.getpid()
    with opened([functools.partial(LivesInAWorker, nth=2, length=None)]) as envs:
        envs.reset(seed=0)
        envs.step(zeros(1))
        with pytest.raises(errors.EnvFailed):
            envs.step(zeros(1))
        (incident,) = envs.incidents
    result = incident.replay()
    assert (result.reproduced, result.exception, result.steps) == (False, None, 2)


def test_an_incident_in_an_environment_that_cannot_be_pickled_says_so_when_replayed(tmp_path):
    lock = threading.Lock()

    def env_fn():
        with lock:
            return Crashing()

    with opened([env_fn], backend="thread") as envs:
        envs.reset(seed=0)
        with pytest.raises(errors.EnvFailed):
            envs.step(zeros(1))
        (incident,) = envs.incidents
    again = Incident.load(incident.save(tmp_path / "file"))
    assert again.seed == 0
    with pytest.raises(errors.ConfigError, match="cannot be pickled"):
        again.replay()


def test_only_incident_files_are_read(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("something else")
    with pytest.raises(errors.ConfigError, match=r"notes\.txt is not an incident file"):
        Incident.load(file)


def test_an_incident_survives_the_journey_to_a_file_whole(tmp_path):
    with opened([functools.partial(Crashing, nth=2)]) as envs:
        envs.reset(seed=1, options={"task": np.arange(3)})
        envs.step(zeros(1))
        with pytest.raises(errors.EnvFailed):
            envs.step(zeros(1))
        (incident,) = envs.incidents
    again = Incident.load(incident.save(tmp_path / "file"))
    assert str(again) == str(incident)
    assert again.traceback == incident.traceback
    assert again.options is not None
    assert again.options["task"].tolist() == [0, 1, 2]
    assert [int(action) for action in again.actions] == [0, 0]


class DrawsFromAnother(Counter):
    """The state of its generator cannot be saved, and it fails in its second episode."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.np_random = np.random.Generator(np.random.MT19937(seed))
            self.num_resets = 0
        self.num_resets += 1
        self.t = 0
        return self.observation(), {}

    def step(self, action):
        if self.num_resets == 2:
            raise ValueError(self.np_random.random())
        return super().step(action)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_episode_from_an_unknown_generator_is_not_called_complete(backend):
    with opened([functools.partial(DrawsFromAnother, length=1)], backend=backend) as envs:
        envs.reset(seed=0)
        with pytest.raises(errors.EnvFailed):
            step_through(envs, [zeros(1)] * 3)
        (incident,) = envs.incidents
    assert (incident.seed, incident.rng) == (None, None)
    assert not incident.is_complete


def test_a_long_episode_is_replayed_whole():
    with opened([functools.partial(Crashing, nth=3000, length=None)]) as envs:
        envs.reset(seed=0)
        with pytest.raises(errors.EnvFailed):
            step_through(envs, ([number % 2] for number in range(3000)))
        (incident,) = envs.incidents
    assert incident.is_complete
    assert len(incident.actions) == 3000
    assert incident.replay().reproduced


def test_incidents_of_a_worker_killed_in_idle_time_name_its_first_slot():
    fleet = Fleet([Resident] * 4, num_workers=2, deadlines=Deadlines(), on_failure="restart")
    fleet.reset([ResetPlan(seed) for seed in range(4)])
    step(fleet)
    kill_and_wait(fleet.call("pid")[2])
    step(fleet)
    (incident,) = fleet.incidents
    assert (incident.slot, incident.slots, incident.seed) == (2, (2, 3), 2)
    assert (incident.kind, incident.exitcode) == ("death", -9)
    fleet.close()


def test_tasks_are_part_of_what_is_kept():
    class Deadly(TaskCounter):
        def step(self, action):
            if self.task == 4:
                raise ValueError("task 4 cannot be done")
            return super().step(action)

    with opened([Deadly] * 2, num_workers=1, on_failure="restart") as envs:
        envs.reset(seed=0, options=[{"task": 1}, {"task": 4}])
        envs.step(zeros(2))
        (incident,) = envs.incidents
        assert incident.options == {"task": 4}
        assert incident.replay().reproduced
        # the restart begins the lost episode again, with its own task
        envs.step(zeros(2))
        assert envs.get_attr("task") == (1, 4)
