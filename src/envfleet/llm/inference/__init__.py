"""Shared inference: one broker in front of one engine, for all workers of a rollout."""
