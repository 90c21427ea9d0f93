"""The configuration of a text-environment command: `--config-name NAME key=value ...`."""

from __future__ import annotations

import argparse
from typing import Literal

from envfleet.cli.arguments import add_option
from envfleet.llm.config import Config, load_config, preset_names
from envfleet.options import CountOrZero

CONFIG_NAME, MODE = "base", "train"


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the configuration of environments, and the seed."""
    parser.add_argument(
        "changes",
        nargs="*",
        metavar="key=value",
        help="changes of the configuration: es_manager.max_workers=4; +key=value for a new key, "
        "~key to take one away",
    )
    parser.add_argument(
        "--config-name",
        default=CONFIG_NAME,
        metavar="NAME",
        help=f"a YAML file, or one of {', '.join(preset_names())} (default: {CONFIG_NAME})",
    )
    mode = Literal["train", "val"]
    add_option(parser, "--mode", "MODE", mode, "which block of es_manager counts", MODE)
    seed = "of the first group, and of the policy (default: the configuration's)"
    add_option(parser, "--seed", "N", CountOrZero, seed)


def config_of(args: argparse.Namespace) -> Config:
    """The configuration that the arguments name."""
    return load_config(args.config_name, args.changes)
