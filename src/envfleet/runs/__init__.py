"""What every long job shares; nothing here knows PPO, or imports torch when it is imported.

job.py          what a kind of job has to provide: its options, its state, one iteration
run.py          the loop: iterate, evaluate, save, stop, and go on later with the same results
folder.py       the files of a run, written while it runs
run_file.py     run.json: what was asked for, and the command that makes the run again
record.py       reads a folder back, for its report page
checkpoint.py   checkpoints that are complete or absent; the newest usable one is found
plain_data.py   nested data and arrays as bytes that cannot run code; pickles kept apart
signing.py      the user's key, which says which pickles may be opened
growing_file.py data that is only appended to, and that a checkpoint names by its length
callbacks.py    what a run tells while it works
clock.py        wall time between two notes
time_report.py  where the time went and what would save some of it
nodes.py        pieces of work for the nodes of a Ray cluster
lock.py         one process at a time in a folder
"""
