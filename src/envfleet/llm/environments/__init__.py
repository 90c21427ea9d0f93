"""Six text environments and what they have in common."""
