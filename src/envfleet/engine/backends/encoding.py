"""Functions and replies as bytes, for backends whose workers are other processes.

Nothing that an environment says can end its worker. A value that cannot be pickled is replaced by
a description of it; a slot whose answer cannot be sent at all is reported as failed.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from envfleet.engine.backends.base import Launch
from envfleet.engine.messages import EnvFailure, Reply
from envfleet.errors import EnvNotPicklable

_PLAIN_TYPES = frozenset((bool, int, float, complex, str, bytes, type(None)))


def encode_env_fns(launch: Launch) -> bytes:
    """Pickle the functions of one worker; the error names the one that cannot be."""
    try:
        blob: bytes = cloudpickle.dumps(list(launch.env_fns))
        return blob
    except Exception as whole:
        for slot, env_fn in enumerate(launch.env_fns, launch.first):
            try:
                cloudpickle.dumps(env_fn)
            except Exception as exc:
                name = getattr(env_fn, "__qualname__", repr(env_fn))
                raise EnvNotPicklable(slot, name, str(exc) or type(exc).__name__) from exc
        raise EnvNotPicklable(launch.first, "its env_fn", str(whole)) from whole


def encode_reply(reply: Reply) -> bytes:
    """Pickle a reply; what cannot travel is replaced by what it looked like.

    Of a slot whose answer cannot travel at all it is told that it failed: nothing that an
    environment says can end its worker.
    """
    try:
        has_values = reply.infos or reply.final_infos or reply.spills or reply.values
        if has_values and not (always_travels(reply.infos) and always_travels(reply.final_infos)):
            reply = _readable(reply)
        return dumps(reply)
    except BaseException:
        pass
    try:
        return dumps(_readable(reply))
    except BaseException as exc:
        return dumps(_unanswered(reply, exc))


def _unanswered(reply: Reply, exc: BaseException) -> Reply:
    """What is left of a reply that cannot travel: who has failed, and who has failed by that."""
    said = (reply.infos, reply.final_infos, reply.spills, reply.final_spills, reply.values)
    failed = {failure.slot for failure in reply.failures}
    slots = sorted({slot for by_slot in said for slot in by_slot} - failed)
    failures = [EnvFailure.of(slot, "sending an answer", exc) for slot in slots]
    return Reply(failures=[*reply.failures, *failures], schemas=reply.schemas)


def _readable(reply: Reply) -> Reply:
    failures = list(reply.failures)
    kept: dict[str, dict[int, Any]] = {}
    for name, doing in (
        ("values", "sending a result"),
        ("spills", "sending an observation"),
        ("final_spills", "sending an observation"),
    ):
        kept[name] = {}
        for slot, value in getattr(reply, name).items():
            problem = _why_it_cannot_travel(value)
            if problem is None:
                kept[name][slot] = value
            else:
                failures.append(EnvFailure.of(slot, doing, problem))
    return Reply(
        failures=failures,
        infos={slot: _readable_items(info) for slot, info in reply.infos.items()},
        final_infos={slot: _readable_items(info) for slot, info in reply.final_infos.items()},
        schemas=reply.schemas,
        values=kept["values"],
        spills=kept["spills"],
        final_spills=kept["final_spills"],
    )


@dataclass(frozen=True, slots=True)
class Unpicklable:
    """Stands in an info for a value that could not travel between processes."""

    type_name: str
    text: str


def _readable_items(info: dict[Any, Any]) -> dict[Any, Any]:
    """An info of which everything can travel, or stands for what cannot."""
    if always_travels(info):
        return info
    return {_readable_item(key): _readable_item(item) for key, item in info.items()}


def _readable_item(value: Any) -> Any:
    try:
        return _readable_value(value)
    except RecursionError:  # it nests too deep, or in itself
        return _stand_in(value)


def _readable_value(value: Any) -> Any:
    if always_travels(value) or _why_it_cannot_travel(value) is None:
        return value
    if isinstance(value, dict):
        return {_readable_value(key): _readable_value(item) for key, item in value.items()}
    return _stand_in(value)


def _stand_in(value: Any) -> Unpicklable:
    try:
        text = repr(value)[:500]
    except BaseException as exc:
        text = f"<its repr raises {type(exc).__name__}>"
    return Unpicklable(type(value).__name__, text)


def always_travels(value: Any) -> bool:
    """Whether a value can certainly be pickled, and read in any process."""
    try:
        return _is_plain(value)
    except RecursionError:
        return False


def _is_plain(value: Any) -> bool:
    """Whether a value is made of what can always be pickled, so that there is no need to try."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return True
    if kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if kind in (list, tuple):
        return all(map(_is_plain, value))
    if kind is np.ndarray:
        return bool(value.dtype.kind != "O")
    return isinstance(value, np.generic)


def _why_it_cannot_travel(value: Any) -> BaseException | None:
    try:
        pickle.loads(dumps(value))
    except BaseException as exc:
        return exc
    return None


def dumps(value: Any) -> bytes:
    """Pickle, with cloudpickle where the standard library cannot."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except BaseException:  # classes of __main__, closures
        blob: bytes = cloudpickle.dumps(value)
        return blob
