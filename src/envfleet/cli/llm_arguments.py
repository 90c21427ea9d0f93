"""The configuration of a text-environment command: `--config-name NAME key=value ...`."""

from __future__ import annotations

import argparse

from envfleet.cli.arguments import at_least, choice_of
from envfleet.llm.config import Config, load_config, preset_names

__all__ = ["add_config_arguments", "config_of"]


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which environments are played, and from which seed."""
    parser.add_argument(
        "changes",
        nargs="*",
        metavar="key=value",
        help="changes of the configuration: es_manager.max_workers=4; +key=value for a new key, "
        "~key to take one away",
    )
    parser.add_argument(
        "--config-name",
        default="base",
        metavar="NAME",
        help=f"a YAML file, or one of {', '.join(preset_names())} (default: %(default)s)",
    )
    parser.add_argument(
        "--mode",
        type=choice_of("train", "val"),
        default="train",
        metavar="MODE",
        help="which block of es_manager counts, train or val (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=at_least(0),
        metavar="N",
        help="of the first group, and of the policy (default: the configuration's)",
    )


def config_of(args: argparse.Namespace) -> Config:
    """What was asked for."""
    return load_config(args.config_name, args.changes)
