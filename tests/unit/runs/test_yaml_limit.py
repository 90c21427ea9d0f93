"""Files of some hundred bytes that stand for billions of values."""

import pytest

from envfleet.cli.config_file import read_config
from envfleet.errors import ConfigError
from envfleet.learn.train_options import TrainOptions
from envfleet.meta.config import load_config

LINES = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
LINES += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
BOMB = "\n".join(LINES) + "\n"


@pytest.mark.parametrize("text", [f"env: {{{BOMB.replace(chr(10), ', ')}}}", "env: &a [*a]", BOMB])
def test_a_file_that_stands_for_too_much_is_refused_in_one_sentence(tmp_path, text):
    file = tmp_path / "bomb.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"bomb.yaml stands for more than 10,000 values"):
        read_config(file, TrainOptions)
    with pytest.raises(ConfigError, match=r"stands for more than 10,000 values"):
        load_config(str(file))


def test_an_ordinary_alias_is_read(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("seed: &n 4\nn_envs: *n\n")
    assert read_config(file, TrainOptions) == {"seed": 4, "n_envs": 4}
