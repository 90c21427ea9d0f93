"""Adapters: the fleet as the environment that another library expects."""
