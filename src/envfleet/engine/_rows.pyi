"""Compiled from _rows.c; what the functions do is said in rows_python.py."""

from envfleet.engine.rows_python import CollectSteps, KeepPcg64, PostSteps
from envfleet.engine.rows_python import common_number as common_number
from envfleet.engine.rows_python import copy_rows as copy_rows
from envfleet.engine.rows_python import note_ends as note_ends
from envfleet.engine.rows_python import put_rows as put_rows
from envfleet.engine.rows_python import step_rows as step_rows
from envfleet.engine.rows_python import take_rewards as take_rewards

post_steps: PostSteps
collect_steps: CollectSteps
keep_pcg64: KeepPcg64
