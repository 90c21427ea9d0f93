"""Workers that are Ray actors, on one machine or a cluster, and the connection to Ray."""
