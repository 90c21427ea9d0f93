"""Rollouts in the forms that other programs read.

    list of Trajectory ─► ragen_cache, chat_row, training_rows ─► write_export ─► a file

Law: token ids, masks and log-probabilities are the engine's own or the export is refused; text is
never tokenised again. A file is written whole or not at all.
"""

from envfleet.llm.export.advantages import advantages_of
from envfleet.llm.export.conversations import chat_row, messages_of, ragen_cache
from envfleet.llm.export.files import FORMS, Exported, write_export
from envfleet.llm.export.json_values import as_json, as_json_line
from envfleet.llm.export.rows import TokenRun, token_runs, training_rows

__all__ = [
    "FORMS",
    "Exported",
    "TokenRun",
    "advantages_of",
    "as_json",
    "as_json_line",
    "chat_row",
    "messages_of",
    "ragen_cache",
    "token_runs",
    "training_rows",
    "write_export",
]
