"""Compiled from _rows.c; what the functions do is said in plain_rows.py."""

from envfleet.engine.plain_rows import CollectSteps, KeepPcg64, PostSteps
from envfleet.engine.plain_rows import common_number as common_number
from envfleet.engine.plain_rows import copy_rows as copy_rows
from envfleet.engine.plain_rows import note_ends as note_ends
from envfleet.engine.plain_rows import put_rows as put_rows
from envfleet.engine.plain_rows import step_rows as step_rows
from envfleet.engine.plain_rows import take_rewards as take_rewards

post_steps: PostSteps
collect_steps: CollectSteps
keep_pcg64: KeepPcg64
