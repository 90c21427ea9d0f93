"""What ``tune`` tries, and what it advises from numbers."""

import pytest

from envfleet.cli.env_argument import EnvChoice
from envfleet.cli.measure import Result, Shares, Slice
from envfleet.cli.tune import (
    FleetSetting,
    advise,
    line_to_paste,
    promising,
    settings_for,
    worker_counts,
)


def setting(backend, workers=1, lockstep=True):
    return FleetSetting(backend, workers, lockstep)


def advice(*measured, num_envs=64, cores=2):
    by_key = {one.key: one for one, _ in measured}
    results = [
        Result(one.key, one.label, (rate,) * 3, (), Shares(0.8, 0.1, 0.1)) for one, rate in measured
    ]
    return advise(results, by_key, num_envs=num_envs, cores=cores)


@pytest.mark.parametrize(
    ("most", "counts"),
    [
        (1, [1]),
        (2, [1, 2]),
        (4, [1, 2, 3, 4]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 11, 12]),
        (64, [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 63, 64]),
    ],
)
def test_worker_counts(most, counts):
    assert worker_counts(most) == counts


def test_settings():
    labels = [one.key for one in settings_for([1, 2], num_envs=4)]

    assert labels == [
        "serial-1-step",
        "process-1-step",
        "process-1-halves",
        "process-2-step",
        "process-2-halves",
        "thread-2-step",
    ]
    assert all(one.lockstep for one in settings_for([1], num_envs=1))


def test_the_fastest_is_advised():
    found = advice((setting("serial"), 1000), (setting("process", 2), 1600))

    assert found.setting == setting("process", 2)
    assert found.why == (
        "2 process workers make 1,600 steps/s: 1.60x of serial, 80% of their time in envs, "
        "a step takes about 1 ms."
    )
    assert found.hint is None


def test_of_equals_the_simplest_is_advised():
    found = advice(
        (setting("serial"), 980), (setting("thread", 2), 985), (setting("process", 2), 1000)
    )

    assert found.setting == setting("serial")
    assert "process, 2 workers, step is only 2.0% faster" in found.why


def test_fewer_workers_are_simpler():
    found = advice(
        (setting("serial"), 100), (setting("process", 3), 990), (setting("process", 4), 1000)
    )

    assert found.setting == setting("process", 3)


def test_halves_are_a_hint():
    found = advice(
        (setting("serial"), 1000),
        (setting("process", 2), 1600),
        (setting("process", 2, lockstep=False), 1900),
    )

    assert found.setting == setting("process", 2)
    assert found.hint is not None
    assert "1,900 steps/s, 1.19x of that" in found.hint


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"num_envs": 1}, "With one environment"),
        ({"cores": 1}, "Only one core"),
        ({}, "Workers would cost more than they save"),
    ],
)
def test_serial_has_a_reason(settings, why):
    found = advice((setting("serial"), 1000), (setting("process", 2), 500), **settings)

    assert found.setting == setting("serial")
    assert found.why.startswith(why)


def test_nothing_measured():
    with pytest.raises(RuntimeError, match="envfleet doctor"):
        advise([], {}, num_envs=1, cores=1)


def test_the_first_pass_drops_the_hopeless_but_never_serial():
    first = {
        "serial-1-step": [Slice(10, 1.0)],
        "process-2-step": [Slice(10, 1.0), Slice(100, 1.0)],
        "thread-2-step": [Slice(49, 1.0), Slice(40, 1.0)],
        "process-1-step": [Slice(51, 1.0)],
    }

    assert promising(first) == {"serial-1-step", "process-2-step", "process-1-step"}
    assert promising({}) == set()


def choice(**kwargs):
    space = None
    return EnvChoice("x", lambda: None, space, space, **kwargs)  # type: ignore[arg-type,return-value]


def test_lines_to_paste():
    cartpole = choice(expression='"CartPole-v1"')
    mine = choice(expression="MyEnv", imports="from mine import MyEnv", env_kwargs="{'size': 8}")

    assert line_to_paste(cartpole, 64, setting("process", 2), None) == [
        'envs = envfleet.make_vec("CartPole-v1", num_envs=64, backend="process", num_workers=2)'
    ]
    assert line_to_paste(cartpole, 4, setting("serial"), "spawn") == [
        'envs = envfleet.make_vec("CartPole-v1", num_envs=4, backend="serial")'
    ]
    assert line_to_paste(mine, 4, setting("process", 2), "spawn") == [
        "from mine import MyEnv",
        'envs = envfleet.make_vec(MyEnv, num_envs=4, backend="process", num_workers=2, '
        "start_method=\"spawn\", env_kwargs={'size': 8})",
    ]
