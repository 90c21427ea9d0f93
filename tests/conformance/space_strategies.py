"""Hypothesis strategies for Gymnasium spaces, with realistic nesting."""

import string

import numpy as np
from gymnasium import spaces
from hypothesis import strategies as st

DTYPES = (np.float32, np.float64, np.uint8, np.int16, np.int64)
ALPHABETS = (string.ascii_lowercase, "aé中🚀", " \t\n\"'\\")


@st.composite
def boxes(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 3), (0,)]))
    if np.issubdtype(dtype, np.floating):
        low, high = draw(st.sampled_from([(-1.0, 1.0), (-np.inf, np.inf), (0.0, np.inf)]))
    else:
        low, high = draw(st.sampled_from([(0, 1), (3, 100)]))
    return spaces.Box(low, high, shape, dtype)


def discretes():
    return st.builds(spaces.Discrete, st.integers(1, 9), start=st.sampled_from([0, -4, 3]))


def multi_discretes():
    return st.builds(spaces.MultiDiscrete, st.sampled_from([[2], [3, 5], [[2, 3], [4, 5]]]))


def multi_binaries():
    return st.builds(spaces.MultiBinary, st.sampled_from([1, 5, (2, 3)]))


def fixed_size():
    """Spaces whose values are arrays of one shape."""
    return st.one_of(boxes(), discretes(), multi_discretes(), multi_binaries())


def texts():
    return st.builds(
        lambda least, more, charset: spaces.Text(least + more, min_length=least, charset=charset),
        st.integers(0, 3),
        st.integers(1, 12),
        st.sampled_from(ALPHABETS),
    )


def sequences():
    return st.builds(
        lambda inner, stack: spaces.Sequence(inner, stack=stack),
        st.one_of(
            boxes(),
            discretes(),
            texts(),
            st.builds(lambda a, b: spaces.Dict(a=a, b=b), boxes(), discretes()),
        ),
        st.booleans(),
    )


def graphs():
    return st.builds(
        spaces.Graph,
        st.sampled_from([spaces.Box(-1, 1, (2,)), spaces.Discrete(3)]),
        st.sampled_from([None, spaces.Box(0, 1, (3,)), spaces.Discrete(4)]),
    )


def one_ofs():
    return st.builds(
        lambda *parts: spaces.OneOf(parts), fixed_size(), st.one_of(texts(), fixed_size())
    )


def leaves():
    return st.one_of(fixed_size(), texts(), sequences(), graphs(), one_ofs())


def any_space():
    """Every space Gymnasium has, as a leaf or inside Dict and Tuple."""
    return st.recursive(
        leaves(),
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, min_size=1, max_size=3).map(
                spaces.Dict
            ),
            st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        ),
        max_leaves=5,
    )
