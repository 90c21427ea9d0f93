"""Places where workers run: this process, its threads, other processes."""
