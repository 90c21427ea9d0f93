"""`envfleet train` as a script: CartPole-v1 in one environment unless flags say otherwise."""

import sys

from envfleet.cli.app import run

if __name__ == "__main__":
    words = sys.argv[1:]
    said = {word.partition("=")[0] for word in words}
    if not said & {"--env", "--resume", "--config"}:
        words += ["--env", "CartPole-v1"]
    if not said & {"--n-envs", "--resume", "--config"}:
        words += ["--n-envs", "1"]
    sys.exit(run(["train", *words]))
