"""``envfleet view``: read the conversations of a rollout in a browser."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

from envfleet.cli.arguments import add_option
from envfleet.cli.command import Context
from envfleet.cli.ctrl_c import StopRequests
from envfleet.cli.report import Report, Text, plural
from envfleet.llm.view import ViewServer
from envfleet.options import Must

Port = Annotated[int, Must("0 to 65535", lambda number: 0 <= number <= 65535)]

_EPILOG = """\
examples:
  envfleet view runs/frozen_lake-1
  envfleet view runs/frozen_lake-1 --port 8080 --no-browser

The page shows every conversation of a rollout that is finished, stopped or still going on. Only
browsers of this machine that know the whole address, with its token, are answered. From another
machine: ssh -L 8080:127.0.0.1:8080 HOST, with --port 8080.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``view``."""
    parser.description = "Serve a page with the conversations of a rollout until Ctrl-C."
    parser.usage = "envfleet view RUN [--port N] [--no-browser]"
    parser.epilog = _EPILOG
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a rollout")
    add_option(parser, "--port", "N", Port, "the port; 0 takes a free one", 0)
    parser.add_argument(
        "--no-browser", action="store_true", help="print the address, and open no browser"
    )


def run(args: argparse.Namespace, context: Context) -> Report:
    """Serve until Ctrl-C."""
    stopped = threading.Event()
    with ViewServer(args.run, args.port) as server, StopRequests(stopped.set):
        context.say(Text(f"{server.url} shows {args.run}; Ctrl-C ends it."))
        if not args.no_browser and has_screen():
            webbrowser.open(server.url)
        stopped.wait()
        num_found = len(server.feed.all_keys())
    return Report(
        ok=True,
        document={"run": str(args.run), "num_trajectories": num_found},
        blocks=(Text(f"Showed {plural(num_found, 'conversation')} of {args.run}."),),
    )


def has_screen() -> bool:
    """Whether a browser would open a window; one without would take over the terminal."""
    return sys.platform == "darwin" or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
