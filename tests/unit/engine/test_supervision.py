"""Pure decisions about trouble: budgets, seeds of restarts, silences, deadlines."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from envfleet.engine.episodes import restart_plan
from envfleet.engine.messages import Op, WorkerStatus, read_status_word, status_word
from envfleet.engine.options import Deadlines, ResetPlan, RestartPolicy
from envfleet.engine.silences import Silence, check_every, is_gap, limit_for
from envfleet.engine.supervision import Decision, RecentFailures, decide
from envfleet.errors import ConfigError

POLICY = RestartPolicy(max_restarts=2, window_s=10.0)


def verdicts(times, on_failure="restart", policy=POLICY, *, is_lost=False):
    recent, found = RecentFailures(), []
    for now_s in times:
        recent, verdict = decide(recent, now_s, on_failure, policy, is_lost=is_lost)
        found.append(verdict)
    return found


# ---- verdicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_failure", "is_lost", "expected"),
    [
        ("raise", False, Decision.RAISE),
        ("raise", True, Decision.RAISE),
        ("restart", False, Decision.REBUILD),
        ("restart", True, Decision.RELAUNCH),
        ("resume", False, Decision.REBUILD),
        ("resume", True, Decision.RELAUNCH),
        ("fallback", False, Decision.RAISE),
        ("fallback", True, Decision.FALL_BACK),
    ],
)
def test_what_a_first_failure_leads_to(on_failure, is_lost, expected):
    recent, verdict = decide(RecentFailures(), 5.0, on_failure, POLICY, is_lost=is_lost)
    assert verdict is expected
    assert recent.failures == (5.0,)


@pytest.mark.parametrize(
    ("on_failure", "expected"),
    [
        ("raise", Decision.RAISE),
        ("restart", Decision.RELAUNCH),
        ("resume", Decision.RELAUNCH),
        ("fallback", Decision.RAISE),
    ],
)
def test_who_was_late_does_not_go_on_in_this_process(on_failure, expected):
    _, verdict = decide(RecentFailures(), 5.0, on_failure, POLICY, is_lost=True, was_late=True)
    assert verdict is expected


def test_the_budget_is_spent_by_failures_within_the_window():
    assert verdicts([0, 1, 2]) == [Decision.REBUILD, Decision.REBUILD, Decision.QUARANTINE]
    assert verdicts([0, 9.9, 10.0, 19.95]) == [Decision.REBUILD] * 4
    assert verdicts([0, 1], policy=RestartPolicy(max_restarts=0)) == [Decision.QUARANTINE] * 2


def test_only_restarts_have_a_budget():
    assert set(verdicts(range(50), "raise")) == {Decision.RAISE}
    assert set(verdicts(range(50), "fallback", is_lost=True)) == {Decision.FALL_BACK}


def test_time_in_which_a_slot_did_nothing_is_not_part_of_the_window():
    recent, found = RecentFailures(), []
    for number in range(1, 4):  # it hangs for as long as the window, again and again
        recent, verdict = decide(
            recent, 10.5 * number, "restart", POLICY, is_lost=True, was_late=True, lost_s=10.0
        )
        found.append(verdict)
    assert found == [Decision.RELAUNCH, Decision.RELAUNCH, Decision.QUARANTINE]
    assert recent.moved(2.0).failures == tuple(when + 2.0 for when in recent.failures)


def test_failures_with_nothing_done_in_between_count_whatever_their_time():
    """One that hangs at every first step comes back only so often, however long its deadline is."""
    recent, found = RecentFailures(), []
    for number, has_worked in enumerate([True, False, True, False, False]):
        recent, verdict = decide(
            recent, 1e6 * number, "resume", POLICY, is_lost=True, has_worked=has_worked
        )
        found.append(verdict)
    assert found == [Decision.RELAUNCH] * 4 + [Decision.QUARANTINE]
    assert recent.failures == (2e6, 3e6, 4e6), "older ones were forgotten when it worked"


gaps = st.lists(st.floats(0.0, 30.0), max_size=40)
policies = st.builds(
    RestartPolicy,
    max_restarts=st.integers(0, 6),
    window_s=st.floats(0.1, 100.0),
)


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.booleans()), max_size=40), policies)
def test_quarantine_comes_exactly_when_too_many_failures_count(failures, policy):
    """One counts until the slot has worked again, and the next one comes after the window."""
    times = list(itertools.accumulate(gap for gap, _ in failures))
    recent = RecentFailures()
    for last, now_s in enumerate(times):
        recent, verdict = decide(
            recent, now_s, "restart", policy, is_lost=False, has_worked=failures[last][1]
        )
        counted = sum(
            all(times[later] - when < policy.window_s or not failures[later][1] for later in after)
            for when, after in ((times[one], range(one + 1, last + 1)) for one in range(last + 1))
        )
        assert (verdict is Decision.QUARANTINE) == (counted > policy.max_restarts)


@given(gaps, policies)
def test_a_ledger_never_grows_beyond_its_window(gaps, policy):
    recent = RecentFailures()
    for now_s in itertools.accumulate(gaps):
        recent = recent.add(now_s, policy.window_s)
        assert all(now_s - when < policy.window_s for when in recent.failures)
        assert recent.failures[-1] == now_s


# ---- seeds of restarts --------------------------------------------------------------------------


def test_a_slot_without_a_seed_is_restarted_without_one():
    assert restart_plan(None, 3) == ResetPlan()


@given(st.integers(0, 2**64), st.integers(1, 1000))
def test_a_restart_s_seed_follows_from_the_seed_and_the_count(seed, num_restarts):
    plan = restart_plan(seed, num_restarts)
    assert plan == restart_plan(seed, num_restarts)
    assert plan.seed is not None
    assert 0 <= plan.seed < 2**31, "Gymnasium's environments take seeds of any size, others do not"
    assert plan.seed != restart_plan(seed, num_restarts + 1).seed


def test_neighbouring_slots_are_restarted_with_different_seeds():
    """They have neighbouring seeds, and may be restarted equally often."""
    seeds = [restart_plan(seed, count).seed for seed in range(200) for count in range(1, 6)]
    assert len(set(seeds)) == len(seeds)


# ---- silences -----------------------------------------------------------------------------------


def test_a_silence_lasts_while_nothing_moves():
    silence = Silence(7, WorkerStatus(Op.STEP, 2), 1.0)
    for now_s in (1.5, 2.0, 100.0):
        silence = silence.look(7, WorkerStatus(Op.STEP, 2), now_s)
    assert silence.since_s == 1.0


@pytest.mark.parametrize(
    ("request_", "where"),
    [
        (8, WorkerStatus(Op.STEP, 2)),
        (7, WorkerStatus(Op.STEP, 3)),
        (7, WorkerStatus(Op.RESET, 2)),
        (7, 0),
    ],
    ids=["another request", "another slot", "another work", "between slots"],
)
def test_any_movement_begins_a_new_silence(request_, where):
    silence = Silence(7, WorkerStatus(Op.STEP, 2), 1.0, is_warned=True)
    assert silence.look(request_, where, 5.0) == Silence(request_, where, 5.0, is_warned=False)


def test_a_warned_silence_stays_warned():
    silence = Silence(7, WorkerStatus(Op.IDLE, None), 1.0, is_warned=True)
    assert silence.look(7, WorkerStatus(Op.IDLE, None), 9.0).is_warned


def test_a_gap_in_our_own_clock_restarts_the_count():
    """Suspended for longer than the deadline: what was due a check ago comes that much too late."""
    deadlines = Deadlines(step_s=2.0)
    check_s = check_every(deadlines)
    assert is_gap(3.0 - check_s, check_s)
    assert not is_gap(0.1, check_s), "a busy machine is late too"
    status = WorkerStatus(Op.STEP, 5)
    silence = Silence(7, status, 1.0, is_warned=True)
    assert silence.restarted(9.0) == Silence(7, status, 9.0, is_warned=True)
    assert silence.restarted(9.0).restarted(12.0).since_s == 12.0


def test_time_without_a_look_is_excused_once():
    """Else a caller that polls now and then would never notice a worker that hangs."""
    status = WorkerStatus(Op.STEP, 5)
    silence = Silence(7, status, 1.0).excused(9.0)
    assert silence.since_s == 9.0
    assert silence.excused(17.0) is silence
    assert not silence.look(8, status, 20.0).is_excused


@given(st.floats(0.01, 1000.0), st.floats(1.0, 10.0))
def test_every_suspension_longer_than_a_deadline_is_a_gap(limit_s, factor):
    check_s = check_every(Deadlines(step_s=limit_s))
    assume(limit_s >= 0.1)
    assert is_gap(factor * limit_s - check_s, check_s)


@given(st.sampled_from(Op), st.integers(0, 2**31), st.integers(0, 2**30))
def test_a_place_reads_back(op, slot, count):
    assert read_status_word(status_word(op, slot, count)) == (op, slot)
    assert status_word(op, slot, count) < 2**64
    assert status_word(op, slot, count) != status_word(op, slot, count + 1)


def test_no_place_is_between_slots():
    assert read_status_word(0) == (Op.IDLE, None)


# ---- deadlines ----------------------------------------------------------------------------------


def test_only_steps_have_the_deadline_of_steps():
    deadlines = Deadlines(step_s=1.0, reset_s=2.0)
    for op in Op:
        expected = (1.0, "step_timeout_s") if op is Op.STEP else (2.0, "reset_timeout_s")
        assert limit_for(op, deadlines) == expected


@given(
    st.none() | st.floats(0.001, 1000),
    st.none() | st.floats(0.001, 1000),
    st.floats(0.001, 1000),
)
def test_looking_often_enough_to_be_little_late(step_s, reset_s, warn_s):
    every_s = check_every(Deadlines(step_s=step_s, reset_s=reset_s, warn_s=warn_s))
    assert 0.005 <= every_s <= 1.0
    for limit_s in (step_s, reset_s, warn_s):
        if limit_s is not None and limit_s >= 0.02:
            assert every_s <= limit_s / 4


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["step_s", "reset_s", "start_s", "close_s", "warn_s"])
def test_a_deadline_is_a_positive_number(name, value):
    with pytest.raises(ConfigError, match=name):
        Deadlines(**{name: value})


def test_a_policy_is_checked_at_birth():
    with pytest.raises(ConfigError, match="max_restarts"):
        RestartPolicy(max_restarts=-1)
    with pytest.raises(ConfigError, match="window_s"):
        RestartPolicy(window_s=0.0)


def test_a_plan_calls_reset_as_gymnasium_does():
    calls = []

    def reset(**how):
        calls.append(how)
        return 0, {}

    options = {"task": 1}
    ResetPlan().apply(reset)
    ResetPlan(3).apply(reset)
    ResetPlan(None, options).apply(reset)
    assert calls == [
        {},
        {"seed": 3, "options": None},
        {"seed": None, "options": {"task": 1}},
    ]
    calls[2]["options"].pop("task")
    assert options == {"task": 1}, "what an environment takes out of its options is its own copy"
