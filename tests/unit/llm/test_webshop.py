"""WebShop as it is played: pages, clicks, rewards, what is told of an episode, and its laws."""

import pickle
import random
import shutil
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfleet.errors import ConfigError, OutOfOrder
from envfleet.llm.environments.webshop import WebShopConfig, WebShopEnv, prepare_catalogue
from envfleet.llm.environments.webshop.catalogue import Product
from envfleet.llm.environments.webshop.goals import Goal
from envfleet.llm.environments.webshop.pages import item_page, results_page, sub_page
from envfleet.llm.environments.webshop.reward import nouns_of, num_options_met, score
from envfleet.llm.environments.webshop.store import open_store
from envfleet.llm.environments.webshop.visit import chosen
from envfleet.llm.registry import env_type
from tests.gates import computes_within

INFO = {
    "reward",
    "action_is_effective",
    "action_is_valid",
    "success",
    "success_purchase",
    "success_find",
    "end_of_page",
}
PARTS = {
    "r_type", "r_att", "w_att", "query_match", "category_match", "title_score", "r_price", "w_price"
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("webshop"))
    store = open_store(prepare_catalogue(WebShopConfig(num_products=400, cache_dir=folder)))
    store.goals()
    store.goals(is_human=True)
    yield folder  # with the store open: what a test opens besides is its own to close
    del store


@pytest.fixture(scope="module")
def make(cache):
    def made(**settings):
        return WebShopEnv(WebShopConfig(**{"num_products": 400, "cache_dir": cache, **settings}))

    return made


def shop(env, seed, max_pages=5):
    """Search the goal's words, open the goal's product, choose its options, buy; the reward."""
    env.reset(seed=seed)
    env.step(f"search[{env.goal.title}]")
    for _ in range(max_pages):
        if f"click[{env.goal.asin.lower()}]" in env.available_actions():
            break
        env.step("click[Next >]")
    else:
        return 0.0
    env.step(f"click[{env.goal.asin}]")
    wanted = env.goal.options
    for value in wanted.values() if isinstance(wanted, dict) else wanted:
        env.step(f"click[{value.replace('/', ' | ')}]")
    return env.step("click[buy now]")[1]


def read_and_shop(env, seed):
    """A shopper that knows what is on the screen and no more; the reward."""
    env.reset(seed=seed)
    asked, _, price = env.render().partition(".Buy ")[0].partition(", and price lower than ")
    what, _, options = asked.removeprefix("Instruction: Find me ").partition(" with ")
    wanted = [one.partition(": ")[2] for one in options.split(", and ")] if options else []
    most = float(price.removesuffix(" dollars") or 1e6)
    results, *_ = env.step(f"search[{what}]")
    for _ in range(5):
        texts = results.split(" [SEP] ")
        first = texts.index("Next >") + 1
        for asin, price in zip(texts[first::3], texts[first + 2 :: 3], strict=True):
            if float(price.split("$")[-1]) > most:
                continue
            env.step(f"click[{asin}]")
            if all(f"click[{value}]" in env.available_actions() for value in wanted):
                for value in wanted:
                    env.step(f"click[{value}]")
                return env.step("click[buy now]")[1]
            env.step("click[< prev]")
        results, *_ = env.step("click[next >]")
    return 0.0


class TestPages:
    def test_the_first_state_is_the_instruction_with_tips_and_actions(self, make):
        env = make()
        state, info = env.reset(seed=4)
        assert info == {}
        assert state.startswith(f"Instruction: {env.goal.text}.")
        assert state.endswith("\n You must choose from these actions:search[<content>].")
        assert "[SEP]" not in state
        assert state == env.render() == env.render("text")

    def test_after_any_action_it_is_a_page_with_tips_and_actions(self, make):
        env = make()
        env.reset(seed=4)
        observation, *_ = env.step("dance")
        assert observation == f"WebShop [SEP] Instruction: [SEP] {env.goal.text} [SEP] Search"
        assert env.render().startswith(f"{observation}.")

    def test_results_are_ten_of_fifty(self, make):
        env = make()
        env.reset(seed=0)
        observation, *_ = env.step("search[shirt]")
        texts = observation.split(" [SEP] ")
        assert texts[:2] == ["Instruction:", env.goal.text]
        assert texts[2] == "Back to Search"
        assert texts[3].startswith("Page 1 (Total results: ")
        assert texts[4] == "Next >"
        assert len(texts) == 5 + 3 * 10
        assert env.available_actions()[:2] == ["click[back to search]", "click[next >]"]
        assert env.available_actions()[2:] == [f"click[{asin.lower()}]" for asin in texts[5::3]]

    def test_an_item_shows_options_title_price_and_buttons(self):
        product = Product(
            "B1", "A Shirt", prices=(5.0, 8.5), options={"size": ["s", "m"], "color": ["red"]}
        )
        page = item_page("buy it", product, has_attributes=True)
        assert page.observation == (
            "Instruction: [SEP] buy it [SEP] Back to Search [SEP] < Prev [SEP] size [SEP] s [SEP] m"
            " [SEP] color [SEP] red [SEP] A Shirt [SEP] Price: $5.0 to $8.5 [SEP] Rating: N.A."
            " [SEP] Description [SEP] Features [SEP] Reviews [SEP] Attributes [SEP] Buy Now"
        )
        assert page.clickables == [
            "back to search", "< prev", "description", "features", "reviews", "attributes",
            "buy now", "s", "m", "red",
        ]  # fmt: skip
        plain = item_page("buy it", product, has_attributes=False)
        assert "attributes" not in plain.clickables

    def test_sub_pages(self):
        product = Product(
            "B1", "A", "Long.", ["one", "two"], attributes=["soft"], category="c", query="q",
            product_category="X", reviews=[["Nice", "5", "Good."]],
        )  # fmt: skip
        begin = "Instruction: [SEP] buy [SEP] Back to Search [SEP] < Prev [SEP] "
        assert {
            name: sub_page("buy", product, name).observation.removeprefix(begin)
            for name in ("Description", "Features", "Reviews", "Attributes")
        } == {
            "Description": "Long.",
            "Features": "one [SEP] two",
            "Reviews": '"Nice" [SEP] 5 [SEP] Good.',
            "Attributes": "soft [SEP] c [SEP] q [SEP] X",
        }

    def test_behind_the_last_page_the_only_way_is_back(self):
        page = results_page("buy", [], 6, 50)
        assert page.is_past_the_end
        assert page.actions == ["click[back to search]", "click[< prev]"]
        assert not results_page("buy", [], 1, 0).is_past_the_end


class TestClicks:
    def test_the_way_through_the_shop_and_back(self, make):
        env = make(show_attrs=True)
        env.reset(seed=1)
        env.step("SEARCH[Dresses]")
        first, *_ = env.step("click[next >]")
        assert "Page 2" in first
        env.step("click[< Prev]")
        page_1 = env.render()
        item, *_ = env.step(env.available_actions()[3].upper().replace("CLICK", "Click"))
        for sub in ("description", "features", "reviews", "attributes"):
            env.step(f"click[{sub}]")
            assert env.available_actions() == ["click[back to search]", "click[< prev]"]
            assert env.step("click[< prev]")[0] == item
        env.step("click[< prev]")
        assert env.render() == page_1
        env.step("click[back to search]")
        assert env.available_actions() == ["search[<content>]"]

    def test_options_are_kept_on_sub_pages_and_forgotten_with_the_product(self, make):
        env = make()
        seed = next(seed for seed in range(50) if self.num_options(env, seed) == 2)
        env.reset(seed=seed)
        env.step(f"search[{env.goal.title}]")
        env.step(f"click[{env.goal.asin}]")
        value = next(iter(env.goal.options.values()))
        *_, info = env.step(f"click[{value}]")
        assert info["action_is_valid"]
        assert info["action_is_effective"]
        assert not env.step(f"click[{value}]")[4]["action_is_effective"]
        env.step("click[features]")
        env.step("click[< prev]")
        assert value in env._visit.options.values()
        env.step("click[< prev]")
        assert env._visit.options == {}

    @staticmethod
    def num_options(env, seed):
        env.reset(seed=seed)
        return len(env.goal.options)

    def test_the_end_of_the_results_is_told(self, make):
        env = make()
        env.reset(seed=0)
        env.step("search[zzzzzz]")
        assert not env.step("click[back to search]")[4]["end_of_page"]
        env.step("search[<r>]")
        infos = [env.step("click[next >]")[4] for _ in range(5)]
        assert [info["end_of_page"] for info in infos] == [False] * 4 + [True]
        shown = env.render()
        info = env.step("click[next >]")[4]
        assert not info["action_is_valid"]
        assert not info["action_is_effective"]
        assert env.render() == shown
        assert env.step("click[< prev]")[4]["end_of_page"] is False

    @pytest.mark.parametrize(
        "action",
        ["click[buy now]", "click[search]", "search[]", "search", "click[", "buy[x]", "[]"],
    )
    def test_what_is_not_offered_changes_nothing(self, make, action):
        env = make()
        env.reset(seed=0)
        page, *_ = env.step("click[nothing]")
        observation, reward, terminated, truncated, info = env.step(action)
        assert (observation, reward, terminated, truncated) == (page, 0.0, False, False)
        assert not info["action_is_valid"]
        assert not info["action_is_effective"]

    def test_a_search_from_another_page_is_answered_but_was_not_offered(self, make):
        env = make()
        env.reset(seed=0)
        env.step("search[shirt]")
        observation, *_, info = env.step("search[granola]")
        assert "Granola" in observation
        assert info["action_is_effective"]
        assert not info["action_is_valid"]

    def test_special_keywords(self, make):
        env = make()
        env.reset(seed=0)

        def found(keywords):
            env.step(f"search[{keywords}]")
            return [env.store.product(number) for number in env._all_found()]

        assert {product.category for product in found("<c> beauty")} == {"beauty"}
        assert len(found("<c> beauty")) > 50
        assert {product.query for product in found("<q> lip balms")} == {"lip balms"}
        assert all("gluten free" in product.attributes for product in found("<a> gluten free"))
        some = found("<r>")
        assert len(some) == len({product.asin for product in some}) == 50
        assert some == found("<r>")
        assert found("<c>") == found("<a> no such thing") == []

    def test_the_last_of_two_options_with_one_value_is_chosen(self):
        product = Product("B1", "x", options={"size": ["one"], "style": ["one", "two"]})
        assert chosen(product, {"size": "one"}, "two") == {"size": "one", "style": "two"}
        assert chosen(product, {}, "one") == {"style": "one"}


class TestRewards:
    GOAL = Goal(
        "B1", "x", ["machine wash", "slim fit"], {"size": "x-large", "color": "navy"}, 50.0,
        "Gora Shirt Linen", "fashion", "shirts", "A › B › C",  # noqa: RUF001
    )  # fmt: skip
    PRODUCT = Product(
        "B1", "Gora Shirt Linen", prices=[40.0], attributes=["machine wash", "slim fit"],
        query="shirts", product_category="A › B › C",  # noqa: RUF001
    )  # fmt: skip
    RIGHT = {"size": "x-large", "color": "navy"}  # noqa: RUF012

    def test_everything_right_is_one(self):
        got = score(self.PRODUCT, self.GOAL, self.RIGHT)
        assert got.reward == 1.0
        assert got.parts == {
            "r_type": 1.0, "query_match": True, "category_match": True, "title_score": 1.0,
            "r_att": 1.0, "w_att": 0.4, "r_option": 1.0, "w_option": 0.4,
            "r_price": True, "w_price": 0.2,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("change", "chosen", "reward"),
        [
            ({"prices": [50.01]}, RIGHT, 4 / 5),
            ({"attributes": ["slim fit"]}, RIGHT, 4 / 5),
            ({"attributes": ["fit, slim"]}, RIGHT, 4 / 5),
            ({"attributes": ["machine washed", "slim fit"]}, RIGHT, 1.0),
            ({"attributes": ["machine dry", "slim fit"]}, RIGHT, 4 / 5),
            ({"attributes": [], "bullets": ["Machine Wash", "Slim Fit"]}, RIGHT, 1.0),
            ({"attributes": [], "description": "slim fit"}, RIGHT, 4 / 5),
            ({}, {}, 3 / 5),
            ({}, {"size": "large", "color": "navy"}, 1.0),
            ({}, {"size": "small", "color": "navy"}, 4 / 5),
            ({}, {"color": "navy blue"}, 3 / 5),
            ({"query": "pants"}, RIGHT, 1.0),
            ({"query": "pants", "product_category": "A", "title": "Shirt"}, RIGHT, 1.0),
            ({"title": "Lamp"}, RIGHT, 0.0),
            ({"title": ""}, RIGHT, 0.0),
        ],
    )
    def test_each_part_counts(self, change, chosen, reward):
        product = replace(self.PRODUCT, **change)
        assert score(product, self.GOAL, chosen).reward == pytest.approx(reward)

    @pytest.mark.parametrize(
        ("shared", "r_type"), [(0, 0.0), (1, 0.1), (2, 0.5), (4, 0.5), (5, 1.0)]
    )
    def test_the_sort_is_told_by_the_titles_if_by_nothing_else(self, shared, r_type):
        words = [f"word{letter}" for letter in "abcdefghijklmnopqrst"]
        goal = replace(self.GOAL, title=" ".join(words), query="q", product_category="Z")
        product = replace(self.PRODUCT, title=" ".join(["other", *words[:shared]]))
        assert score(product, goal, {}).parts["r_type"] == r_type

    def test_nouns_can_be_found_by_another_function(self, make):
        got = score(self.PRODUCT, self.GOAL, self.RIGHT, lambda title: [])
        assert got.parts["title_score"] == 0.2
        assert make(nouns="envfleet.llm.environments.webshop.reward:nouns_of")._nouns is nouns_of

    def test_a_title_s_nouns_by_the_rule(self):
        assert nouns_of("Vomo 2-Pack of Men's Shirts, 100% Cotton") == [
            "vomo", "pack", "men's", "shirts", "cotton",
        ]  # fmt: skip

    def test_options_of_people_are_values_only(self):
        assert num_options_met(["navy blue", "x-large"], ["blue", "x-large"]) == 2
        assert num_options_met(["light blue"], ["dark blue"]) == 1
        assert num_options_met([], ["red"]) == 0

    def test_the_very_value_is_never_missed(self):
        """By its first colour it would be red, which is not among its words."""
        assert num_options_met(["charred oak"], [("style", "charred oak")]) == 1

    def test_without_options_there_is_no_part_for_them(self):
        got = score(self.PRODUCT, replace(self.GOAL, options={}), {})
        assert got.reward == 1.0
        assert "r_option" not in got.parts

    def test_a_perfect_purchase_or_nothing(self, make):
        env = make(binary_reward=True)
        env.reset(seed=0)
        env.step(f"search[{env.goal.query}]")
        env.step(env.available_actions()[-1])
        _, reward, terminated, _, info = env.step("click[buy now]")
        assert terminated
        assert reward == info["reward"] == 0.0
        assert 0 < info["raw_reward"] < 1
        assert shop(make(binary_reward=True), 1) in (0.0, 1.0)


class TestShopper:
    @pytest.mark.parametrize("is_human", [False, True])
    def test_a_gifted_shopper_earns_one(self, make, is_human):
        env = make(human_goals=is_human)
        rewards = [shop(env, seed) for seed in range(40)]
        assert sum(reward == 1.0 for reward in rewards) >= 38

    def test_a_shopper_that_reads_earns_one_now_and_then(self, make):
        env = make()
        rewards = [read_and_shop(env, seed) for seed in range(60)]
        assert sum(reward == 1.0 for reward in rewards) >= 10, rewards
        assert sum(rewards) / len(rewards) > 0.4

    def test_the_goal_s_own_product_is_worth_one(self, make):
        env = make()
        env.reset(seed=0)
        store = env.store
        by_asin = {store.product(n).asin: store.product(n) for n in range(store.num_products)}
        for number in range(0, store.num_goals["synthetic"], 7):
            goal = store.goal(number)
            assert score(by_asin[goal.asin], goal, dict(goal.options)).reward == 1.0

    def test_what_is_told_of_a_purchase(self, make):
        env = make()
        assert shop(env, 3) == 1.0
        env.reset(seed=3)
        *_, info = env.step("search[shirt]")
        assert set(info) == INFO
        env.step(env.available_actions()[-1])
        *_, terminated, truncated, info = env.step("click[buy now]")
        assert (terminated, truncated) == (True, False)
        assert set(info) - {"r_option", "w_option"} == INFO | PARTS
        assert info["success_purchase"]
        assert all(isinstance(value, bool | float) for value in info.values())
        assert env.available_actions() == []
        assert env.render("text").startswith("Thank you for your purchase [SEP] B0")
        with pytest.raises(OutOfOrder, match="call reset first"):
            env.step("click[buy now]")


class TestLaws:
    @staticmethod
    def play(env, seed, moves):
        """Random clicks and searches among what is offered; everything that was seen."""
        draw = random.Random(seed)
        seen = [env.reset(seed=seed)]
        for _ in range(moves):
            action = draw.choice(env.available_actions())
            seen.append(env.step(action.replace("<content>", draw.choice(("wash", "tea", "<r>")))))
            seen.append(env.render())
            if seen[-2][2]:
                break
        return seen

    def test_random_clicks_never_fail_and_repeat(self, make):
        one, other = make(show_attrs=True), make(show_attrs=True)
        for seed in range(60):
            seen = self.play(one, seed, 30)
            assert seen == self.play(other, seed, 30)
            for step in seen[1::2]:
                assert 0.0 <= step[1] <= 1.0
                assert step[4]["action_is_valid"]
                assert step[0] in one.observation_space

    def test_an_episode_goes_on_in_a_copy(self, make):
        for seed in range(12):
            env = make()
            self.play(env, seed, seed)
            if not env._is_running:
                continue
            copies = [env, pickle.loads(pickle.dumps(env)), deepcopy(env)]
            for _ in range(5):
                assert len({copy.render() for copy in copies}) == 1
                action = env.available_actions()[-1].replace("<content>", "soft pillow")
                steps = [copy.step(action) for copy in copies]
                assert steps[0] == steps[1] == steps[2]
                if steps[0][2]:
                    break

    def test_an_environment_is_small(self, make):
        env = make()
        self.play(env, 5, 4)
        assert len(pickle.dumps(env)) < 4000
        env.reset(seed=0)
        env.step("search[beauty]")
        few = len(pickle.dumps(env))
        env.step("search[<c> beauty]")
        assert len(env._all_found()) > 50
        assert len(pickle.dumps(env)) < few + 50

    def test_modes_have_goals_of_their_own(self, make):
        env = make()
        numbers: dict[str, set[int]] = {}
        for mode in ("train", "val", "test"):
            numbers[mode] = set()
            for seed in range(30):
                env.reset(seed=seed, options={"mode": mode})
                numbers[mode].add(env._visit.goal)
        assert numbers["train"].isdisjoint(numbers["val"] | numbers["test"])
        assert numbers["val"].isdisjoint(numbers["test"])

    def test_environments_of_a_process_share_one_store(self, make):
        one, other = make(), make()
        one.reset(seed=0)
        other.reset(seed=1)
        assert one.store is other.store

    def test_a_store_that_was_deleted_is_built_again(self, tmp_path):
        env = WebShopEnv(WebShopConfig(num_products=20, cache_dir=str(tmp_path)))
        before = env.reset(seed=0)
        copied = pickle.dumps(env)
        del env
        shutil.rmtree(tmp_path)
        assert pickle.loads(copied).render() == before[0]

    HOSTILE: tuple[Any, ...] = (
        None, 3.5, {}, [], 10**400, b"search[x]", float("nan"), object(), "", "[", "]", "click[]",
        "search[" + "x " * 500_000 + "]", "search[" * 100_000, "click[" + "[" * 10**6 + "]",
        "search[\x00\x1b[31m\ud800]", "search[9**9**9]", "search[__import__('os').system('x')]",
        "search[<r>]" * 3, "search[<c>]", "search[<a>]", "search[=]", "search[c=beauty]",
        "\n" * 10**6,
        "click[buy now\x00]", "search[" + "a" * 10**6 + "]", "search[" + "'" * 1000 + "]",
    )  # fmt: skip

    @pytest.mark.parametrize("action", HOSTILE, ids=range(len(HOSTILE)))
    def test_a_hostile_action_is_answered_at_once(self, make, action):
        env = make()
        env.reset(seed=0)
        env.step("search[tea]")
        with computes_within(0.5):
            observation, reward, terminated, _, info = env.step(action)
        assert isinstance(observation, str)
        assert (reward, terminated, info["action_is_valid"]) == (0.0, False, False)

    @settings(max_examples=150)
    @given(st.text(max_size=40), st.sampled_from(("{}", "search[{}]", "click[{}]", "{}]")))
    def test_any_text_is_answered(self, make, text, form):
        env = make()
        env.reset(seed=0)
        observation, reward, *_ = env.step(form.format(text))
        assert observation in env.observation_space
        assert reward == 0.0
        env.render()


class TestConfig:
    def test_the_default_generates_a_thousand_products(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ENVFLEET_CACHE", str(tmp_path))
        env = env_type("webshop").make(None)
        env.reset(seed=0)
        assert env.store.num_products == 1000
        assert env.store.num_goals["synthetic"] > 1500
        assert env.store.folder.parent == tmp_path / "webshop"

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"dataset": "medium"}, "small or full"),
            ({"observation_mode": "html"}, "no HTML"),
            ({"num_products": 0}, "num_products must be at least 1"),
            ({"file_path": "/no/such.json"}, "file_path: there is no file"),
            ({"attr_path": "x.json"}, "give file_path as well"),
            (
                {"filter_goals": "no.such:thing"},
                "filter_goals: 'no.such:thing' is not a .package.module:function",
            ),
            ({"nouns": "os:path"}, "nouns: 'os:path' is no function but a module"),
            ({"limit_goals": -2}, "limit_goals must be at least -1, got -2"),
            ({"nouns": "math"}, "package.module:function"),
        ],
    )
    def test_mistakes_are_named(self, settings, said):
        with pytest.raises(ConfigError, match=said):
            WebShopEnv(WebShopConfig(**settings))

    def test_a_folder_that_cannot_be_used_is_named(self, tmp_path):
        (tmp_path / "file").touch()
        env = WebShopEnv(WebShopConfig(num_products=3, cache_dir=str(tmp_path / "file")))
        said = r"catalogue cannot be built in .*file: File exists; cache_dir or \$ENVFLEET_CACHE na"
        with pytest.raises(ConfigError, match=said):
            env.reset(seed=1)

    def test_filter_and_limit_leave_some_goals(self, make):
        env = make(filter_goals=lambda number, goal: goal.category == "beauty", limit_goals=5)
        goals = set()
        for seed in range(40):
            env.reset(seed=seed)
            assert env.goal.category == "beauty"
            goals.add(env.goal.text)
        assert 1 < len(goals) <= 5
