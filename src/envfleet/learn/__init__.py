"""Learning on the fleet: advantages, normalisers, networks, PPO. Needs the `train` extra."""
