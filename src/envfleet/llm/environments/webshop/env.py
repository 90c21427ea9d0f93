"""WebShop: find a product in a shop by its words, choose its options, buy it.

Law: an episode is its goal and where in the shop the shopper stands, a few words in all. What the
shop holds is a store on disk that is opened by its path wherever the environment goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from envfleet.llm.environments.base import Mode, Step, TextEnv
from envfleet.llm.environments.webshop.config import (
    WebShopConfig,
    function_named,
    prepare_catalogue,
    source_of,
)
from envfleet.llm.environments.webshop.goals import FilterGoals, Goal
from envfleet.llm.environments.webshop.pages import (
    BACK,
    BUY,
    NEXT,
    PER_PAGE,
    PREVIOUS,
    SUB_PAGES,
    Page,
    done_page,
    item_page,
    results_page,
    search_page,
    sub_page,
)
from envfleet.llm.environments.webshop.reward import Nouns, Score, score
from envfleet.llm.environments.webshop.store import GoalOrder, Store, open_store
from envfleet.llm.environments.webshop.visit import Visit, chosen, find, parse

TIPS = (
    "Buy something within 10 actions; it need not match in every detail.",
    "Search for what the product is, without its size or color.",
    "Search at most twice.",
    "A product that is close enough and bought beats a better one that is not.",
    "Look at the products of this page before you go to the next one.",
    "Go to the next page at most twice, and back only for something you saw there.",
    "With fewer than 3 actions left, buy the first product you see.",
    "Choose the options the instruction names, one click each, before click[buy now]; with one "
    "action left just buy. Descriptions need not be read.",
)


class WebShopEnv(TextEnv):
    """One visit to the shop; it ends with a purchase."""

    config_class = WebShopConfig
    config: WebShopConfig
    _store: Store | None
    _goal: Goal | None
    _shown: Page | None
    _found: tuple[str, Sequence[int]] | None

    def _prepare(self) -> None:
        """Check the source of the catalogue, which is built when the first episode begins."""
        source_of(self.config)  # a missing file is an error now, not at the first reset
        self._filter = cast(
            "FilterGoals | None", function_named(self.config.filter_goals, "filter_goals")
        )
        self._nouns = cast("Nouns | None", function_named(self.config.nouns, "nouns"))
        self._folder: Path | None = None
        self._visit = Visit(0, 0)
        self._score: Score | None = None
        self._store = self._goal = self._shown = self._found = None

    # ---- the goal and the catalogue -------------------------------------------------------------

    @property
    def goal(self) -> Goal:
        """The goal of this episode."""
        if self._goal is None:
            self._goal = self.store.goal(self._visit.goal, is_human=self.config.human_goals)
        return self._goal

    @property
    def store(self) -> Store:
        """The catalogue, opened."""
        if self._store is None:
            if self._folder is None or not self._folder.is_dir():
                self._folder = prepare_catalogue(self.config)
            self._store = open_store(self._folder)
        return self._store

    def available_actions(self) -> list[str]:
        """Every possible action on this page."""
        return self._page.actions

    def __getstate__(self) -> dict[str, Any]:
        """The state without what can be opened or computed again."""
        kept = self.__dict__.copy()
        for name in ("_store", "_goal", "_shown", "_found"):
            kept[name] = None
        return kept

    # ---- an episode -----------------------------------------------------------------------------

    def _begin(self, seed: int, mode: Mode) -> None:
        self._goal = self._shown = self._found = None
        self._score = None
        self._visit = Visit(self._goal_order.number(seed, mode), seed)

    def _act(self, action: Any) -> Step:
        # After any action the observation is a page, even if the action did nothing.
        page = self._page
        if self._visit.place == "start":
            self._visit = replace(self._visit, place="search")
        before = self._visit
        name, words = parse(action)
        is_valid = False
        if name == "search":
            is_valid = page.has_search_bar
            self._visit = Visit(before.goal, before.seed, "results", keywords=words)
        elif name == "click" and words in page.clickables:
            is_valid = f"click[{words}]" in page.actions
            self._visit = self._after_click(before, words)
        if self._visit != before:
            self._shown = None
        is_done = self._visit.place == "done"
        info: dict[str, Any] = dict(self._score.parts) if self._score else {}
        raw = self._score.reward if self._score else 0.0
        reward = float(raw >= 1) if self.config.binary_reward else raw
        if self.config.binary_reward:
            info["raw_reward"] = raw
        is_perfect = is_done and raw >= 1
        info |= {
            "reward": reward,
            "action_is_effective": self._visit != before,
            "action_is_valid": is_valid,
            "success": is_perfect,
            "success_purchase": is_done,
            "success_find": is_perfect,
            "end_of_page": self._page.is_past_the_end,
        }
        return self._page.observation, reward, is_done, False, info

    def _text(self) -> str:
        page = self._page
        # Before the first action only the instruction is shown.
        first = self._visit.place == "start"
        said = f"Instruction: {self.goal.text}" if first else page.observation
        tips = "\n".join(TIPS)
        return f"{said}.{tips}\n You must choose from these actions:{', '.join(page.actions)}."

    # ---- the shop -------------------------------------------------------------------------------

    def _after_click(self, visit: Visit, words: str) -> Visit:
        """The visit after a click on this page."""
        if words == BACK.lower():
            return Visit(visit.goal, visit.seed, "search")
        if visit.place == "results":
            if words == NEXT.lower() and self._page.is_past_the_end:
                return visit  # there is no next page
            if words in (NEXT.lower(), PREVIOUS.lower()):
                return replace(visit, number=visit.number + (1 if words == NEXT.lower() else -1))
            asins = self._page.choices
            return replace(visit, place="item", product=self._results()[asins.index(words)])
        if words == PREVIOUS.lower():
            if visit.place == "item":
                return replace(visit, place="results", product=-1, options={})
            return replace(visit, place="item")
        for sub in SUB_PAGES:
            if words == sub.lower() and sub in self._page.buttons:
                return replace(visit, place=sub)
        if words == BUY.lower():
            product = self.store.product(visit.product)
            self._score = score(product, self.goal, visit.options, self._nouns)
            return replace(visit, place="done")
        return replace(
            visit, options=chosen(self.store.product(visit.product), visit.options, words)
        )

    @property
    def _page(self) -> Page:
        if self._shown is None:
            self._shown = self._make_page(self._visit)
        return self._shown

    def _make_page(self, visit: Visit) -> Page:
        asked = self.goal.text
        if visit.place in ("start", "search"):
            return search_page(asked)
        if visit.place == "results":
            products = [self.store.product(number) for number in self._results()]
            return results_page(asked, products, visit.number, len(self._all_found()))
        product = self.store.product(visit.product)
        if visit.place == "done":
            assert self._score is not None
            return done_page(product, visit.options, self._score.reward)
        if visit.place == "item":
            return item_page(asked, product, has_attributes=self.config.show_attrs)
        return sub_page(asked, product, visit.place)

    def _results(self) -> list[int]:
        """The products on this page of results."""
        first = (self._visit.number - 1) * PER_PAGE
        return [int(number) for number in self._all_found()[first : first + PER_PAGE]]

    def _all_found(self) -> Sequence[int]:
        visit = self._visit
        if self._found is None or self._found[0] != visit.keywords:
            self._found = (visit.keywords, find(self.store, visit.keywords, visit.seed))
        return self._found[1]

    @property
    def _goal_order(self) -> GoalOrder:
        return self.store.goals(
            is_human=self.config.human_goals,
            filter_goals=self._filter,
            limit=self.config.limit_goals,
        )
