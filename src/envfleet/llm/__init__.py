"""Text environments for language models, and the manager that plays many of them at once."""
