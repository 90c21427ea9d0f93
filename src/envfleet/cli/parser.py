"""argparse, with errors as one sentence that is raised: the application decides where it goes.

An unknown flag or command is answered with the nearest right one. Not tyro or cyclopts: commands
that are imported only when typed, flags over a file over a recipe, names known from other libraries
and errors as JSON would stay by hand, and what they would save is `flags.py`, 100 lines.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from envfleet.cli.command import UsageError
from envfleet.cli.flags import suggestion
from envfleet.errors import did_you_mean

_SAME = {"--num-envs": "--n-envs", "--n-envs": "--num-envs"}
"""Both are known from other libraries; a command has one of them and takes the other too."""


def _as_known(word: str, flags: Mapping[str, Any]) -> str:
    flag, equals, value = word.partition("=")
    same = _SAME.get(flag, flag)
    return f"{same}{equals}{value}" if flag not in flags and same in flags else word


class Help(argparse.HelpFormatter):
    """Wraps paragraphs like argparse, and leaves those with indented lines (examples) alone."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = [
            paragraph.rstrip()
            if "\n  " in paragraph
            else super(Help, self)._fill_text(paragraph, width, indent)
            for paragraph in text.split("\n\n")
        ]
        return "\n\n".join(paragraphs)


class Parser(argparse.ArgumentParser):
    """A parser of one command, or of all."""

    def __init__(self, **kwargs: Any) -> None:
        """As argparse's; flags are never shortened, and help leaves examples as they are."""
        super().__init__(**{"formatter_class": Help, "allow_abbrev": False, **kwargs})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; an unknown flag or command is reported before a missing one."""
        words = list(sys.argv[1:] if args is None else args)
        commands = self._commands()
        flags = self._option_string_actions
        if not commands:
            words = [_as_known(word, flags) for word in words]
        own = itertools.takewhile(lambda word: word not in commands, words)
        is_value = False
        for word in _words_that_matter(own):
            if word.startswith("--"):
                flag, equals, _ = word.partition("=")
                if flag not in flags:
                    self.error(f"there is no {flag}{suggestion(flag, flags)}")
                is_value = not equals and flags[flag].nargs is None
            elif is_value:
                is_value = False
            elif commands:
                # the first plain word of a parser that has commands has to be one
                self.error(f"there is no command {word!r}{did_you_mean(word, commands)}")
        found, unknown = super().parse_known_args(words, namespace)
        return found, self._gathered(found, unknown)

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong."""
        said = re.sub(r"^argument (\S+): (?=must )", r"\1 ", message)
        raise UsageError(
            f"{said.rstrip('.')}{'' if said.endswith('?') else ';'} see {self.prog} --help"
        )

    def _gathered(self, found: argparse.Namespace, unknown: list[str]) -> list[str]:
        """What is still unknown: argparse takes only the first of words that flags lie between."""
        for action in self._actions:
            if not action.option_strings and action.nargs == "*":
                getattr(found, action.dest).extend(w for w in unknown if not w.startswith("-"))
                return [word for word in unknown if word.startswith("-")]
        return unknown

    def _commands(self) -> frozenset[str]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return frozenset(action.choices)
        return frozenset()


def _words_that_matter(words: Iterable[str]) -> Iterable[str]:
    """Flags and plain words; not what follows `--`, nor what argparse takes for a value."""
    for word in words:
        if word == "--":
            return
        if not word.startswith("-") or (word.startswith("--") and " " not in word):
            yield word
