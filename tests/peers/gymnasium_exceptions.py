"""Tests of Gymnasium's that do not apply to a fleet: test id -> why. What is not here must pass.

An id without parameters stands for all of them; one that ends in `*` for all that begin so.
"""

_HALVES = (
    "calls reset_async/reset_wait or step_async/step_wait, AsyncVectorEnv's halves of a call; a "
    "fleet has send and recv, and limits in make_vec's step_timeout_s and reset_timeout_s"
)
_ENVS = (
    "reads SyncVectorEnv.envs, the list of environments; a fleet's may live in other processes "
    "and are reached with call, get_attr and set_attr"
)
_MODE = (
    "passes observation_mode, which make_vec does not have: the slots of a vector environment "
    "have equal spaces, and envfleet.engine.Fleet takes slots that differ"
)
_ASYNC = "tests/vector/test_async_vector_env.py"
_MODES = "tests/vector/test_observation_mode.py::TestVectorEnvObservationModes"
_MAKE = "tests/envs/registration/test_make_vec.py"

EXCEPTIONS: dict[str, str] = {
    f"{_ASYNC}::test_reset_timeout_async_vector_env": _HALVES,
    f"{_ASYNC}::test_step_timeout_async_vector_env": _HALVES,
    f"{_ASYNC}::test_reset_out_of_order_async_vector_env": _HALVES,
    f"{_ASYNC}::test_step_out_of_order_async_vector_env": _HALVES,
    f"{_ASYNC}::test_custom_space_async_vector_env_shared_memory": (
        "wants a custom space to be refused with shared memory; a fleet carries it"
    ),
    f"{_ASYNC}::test_async_vector_subenv_error": (
        "wants an exception of the class that the environment raised, which cannot be rebuilt for "
        "every class, the traceback as warnings, and a step before the first reset; a fleet raises "
        "EnvFailed with the traceback as its cause, and ResetNeeded"
    ),
    "tests/vector/test_autoreset_mode.py::test_autoreset_within_step": (
        "wants a last observation of Discrete to be an int as the environment returned it; a row "
        "of numbers gives the equal np.int64, as Discrete.sample does. The rest is in our suite"
    ),
    f"{_MODES}::test_invalid_observation_mode": _MODE,
    f"{_MODES}::test_obs_mode_same_different_spaces": (
        "wants the refusal of unequal spaces to advise observation_mode, which make_vec lacks"
    ),
    f"{_MODES}::test_obs_mode_different_different_spaces": _MODE,
    f"{_MODES}::test_obs_mode_different_different_shapes": _MODE,
    f"{_MODES}::test_mixed_observation_spaces[different*": _MODE,
    f"{_MODES}::test_mixed_observation_spaces[observation_mode2*": _MODE,
    "tests/vector/test_sync_vector_env.py::test_check_spaces_sync_vector_env": (
        "wants the name SyncVectorEnv in the refusal of unequal spaces; that there is one is "
        "checked by test_check_spaces_async_vector_env, and its text in our suite"
    ),
    "tests/vector/test_sync_vector_env.py::test_metadata_sync_vector_env": _ENVS,
    "tests/wrappers/vector/test_normalize_reward.py::test_equivalence_with_wrapper": _ENVS,
    f"{_MAKE}::test_make_vec_wrappers": _ENVS,
    f"{_MAKE}::test_make_vec_with_spec_additional_wrappers": _ENVS,
}
