"""Tests of AgileRL's that do not apply to a fleet: test id -> why. The rest must pass.

An id without parameters stands for all of them; one that ends in `*` for all that begin so.
"""

_FILE = "tests/test_vector/test_vector.py::"
_VEC = f"{_FILE}TestAsyncPettingZooVecEnv"
_STATES = "sets AgileRL's own state, or reads it, instead of calling what leads there"
_PIPES = "uses its pipes and processes, one for each environment; a fleet has neither"
_PARTS = "calls a private part of AgileRL's class, which a fleet does not have"
_BASE = "is about AgileRL's abstract class, from which ours does not derive"

EXCEPTIONS: dict[str, str] = {
    f"{_VEC}Init::*": _PARTS,
    f"{_VEC}Step::test_env_order_preserved": _PIPES,
    f"{_VEC}Reset::test_async_vector_subenv_init_error": (
        "wants an environment that cannot be built to be reported at the first reset; a fleet "
        "raises EnvConstructionFailed when it is made"
    ),
    f"{_VEC}Call::test_call_exception_worker": (
        "asks for the words of AgileRL's error; a fleet refuses the call with a ValueError too"
    ),
    f"{_VEC}ResetAsync::*": _STATES,
    f"{_VEC}ResetWait::*": _STATES,
    f"{_VEC}StepAsync::*": _STATES,
    f"{_VEC}CallAsync::*": _STATES,
    f"{_VEC}SetAttr::test_set_attr_exception": _STATES,
    f"{_VEC}StepWait::test_step_wait_timeout_async_pz_vector_env": _PIPES,
    f"{_VEC}CallWait::test_call_wait_timeout_async_pz_vector_env": _PIPES,
    f"{_VEC}CloseExtras::*": _PIPES,
    f"{_VEC}PollPipeEnvs::*": _PIPES,
    f"{_VEC}AssertIsRunning::*": _PARTS,
    f"{_VEC}AddInfo::*": _PARTS,
    f"{_VEC}Del::*": _PIPES,
    f"{_FILE}TestAsyncWorker::*": _PIPES,
    f"{_FILE}TestObservations::*": _PARTS,
    f"{_FILE}TestWriteToSharedMemory::*": _PARTS,
    f"{_FILE}TestGetPlaceholderValue::*": _PARTS,
    f"{_FILE}TestPettingZooVecEnv*": _BASE,
}
