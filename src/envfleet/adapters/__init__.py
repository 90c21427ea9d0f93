"""Doors for other people's code: the fleet as the vector environment they already know."""
