"""What to try where a meta-RL run spends its time, in the words of its options. Pure."""

from __future__ import annotations

from collections.abc import Callable

from envfleet.runs.time_report import Parts, Reasoned, Remedies, Remedy, Setup

__all__ = ["LEARNER_REMEDIES", "RL2_REMEDIES"]

WORKERS, TRIALS = "env.num_parallel_workers", "train.num_rollouts_per_iter"


def _environments(parts: Parts, setup: Setup) -> Reasoned:
    share, now = parts["environments"], max(setup.num_workers, 1)
    remedies, why = [Remedy("an environment whose steps take half as long", 1 - share / 2)], ""
    if setup.cores > now:
        what = f"{WORKERS}={4 * setup.cores}, which uses {setup.cores} cores"
        remedies.append(Remedy(what, 1 - share * (1 - now / setup.cores), True))
    else:
        why = "all cores are busy with them" if now > 1 else ""
    return why, remedies


def _shared(part: str, why: str, option: str = WORKERS) -> Callable[[Parts, Setup], Reasoned]:
    def remedy(parts: Parts, setup: Setup) -> Reasoned:
        what = f"{option}={2 * setup.n_envs} instead of {setup.n_envs}, which share it"
        return why, [Remedy(what, 1 - parts[part] / 2, True)]

    return remedy


def _learning(parts: Parts, setup: Setup) -> Reasoned:
    share = parts["learning"]
    remedies = [
        Remedy("half as many updates (train.num_updates_per_iter)", 1 - share / 2),
        Remedy("half the batch (train.batch_size)", 1 - share / 2, True),
    ]
    if setup.is_on_cpu:
        remedies.append(Remedy("a GPU", 1 - share, True))
    return f"the agent learns, so more {WORKERS} will not help", remedies


def _evaluation(parts: Parts, setup: Setup) -> Reasoned:
    what = "half as many evaluations (eval.log_interval) or tasks in them (eval.max_eval_tasks)"
    return "", [Remedy(what, 1 - parts["evaluation"] / 2)]


def _the_rest(parts: Parts, setup: Setup) -> Reasoned:
    fewer = Remedy("half as many checkpoints (eval.save_interval)", 1 - parts["the rest"] / 2, True)
    return "checkpoints and notes take it", [fewer]


_SLOWEST = "slots wait for the slowest of them"
_SHORT = "steps are short against the way to the environments"
RL2_REMEDIES: Remedies = {
    "waiting": _shared("waiting", _SLOWEST, TRIALS),
    "transport": _shared("transport", _SHORT, TRIALS),
    "environments": _environments,
    "evaluation": _evaluation,
    "the rest": _the_rest,
}
LEARNER_REMEDIES: Remedies = {
    **RL2_REMEDIES,
    "waiting": _shared("waiting", _SLOWEST),
    "transport": _shared("transport", _SHORT),
    "inference": _shared("inference", "the policy is the bottleneck, not the environments"),
    "bookkeeping": _shared("bookkeeping", "every step is stored and counted"),
    "learning": _learning,
}
