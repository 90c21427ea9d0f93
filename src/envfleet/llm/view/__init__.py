"""Conversations of a rollout in a browser, while it goes on and afterwards.

journal ─► JournalFeed ─► ViewServer ─► page.html
"""

from envfleet.llm.view.feed import JournalFeed, Query, Summary
from envfleet.llm.view.server import ViewServer

__all__ = ["JournalFeed", "Query", "Summary", "ViewServer"]
