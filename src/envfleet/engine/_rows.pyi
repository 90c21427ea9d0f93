"""Compiled from _rows.c; rows_python.py says what the functions do."""

from envfleet.engine.rows_python import KeepPcg64
from envfleet.engine.rows_python import collect_steps as collect_steps
from envfleet.engine.rows_python import common_number as common_number
from envfleet.engine.rows_python import copy_rows as copy_rows
from envfleet.engine.rows_python import note_ends as note_ends
from envfleet.engine.rows_python import post_steps as post_steps
from envfleet.engine.rows_python import put_rows as put_rows
from envfleet.engine.rows_python import step_rows as step_rows
from envfleet.engine.rows_python import wait_for_count as wait_for_count

keep_pcg64: KeepPcg64
