"""Tests of Stable-Baselines3's that do not apply to a fleet: test id -> why. The rest must pass.

An id without parameters stands for all of them; one that ends in `*` for all that begin so.
"""

EXCEPTIONS: dict[str, str] = {
    "tests/test_vec_normalize.py::test_discrete_obs": (
        "makes an id that Gymnasium has retired and expects Gymnasium's own exception to come out "
        "of the constructor; a fleet raises EnvConstructionFailed with that one as its cause"
    ),
    "tests/test_vec_check_nan.py::test_check_nan": (
        "ends with two actions of two numbers for one environment with one; a fleet refuses a "
        "wrong number of actions. That VecCheckNan works on it is in our suite"
    ),
}
