"""WebShop's catalogue: irregular rows, files read in pieces, stores built once, goals."""

import json
import multiprocessing
import os
import random
import tempfile
from contextlib import contextmanager
from itertools import product as every_combination
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.errors import ConfigError
from envfleet.llm.environments.base import Mode
from envfleet.llm.environments.webshop import (
    WebShopConfig,
    WebShopEnv,
    prepare_catalogue,
    write_catalogue,
)
from envfleet.llm.environments.webshop import json_stream as json_stream_module
from envfleet.llm.environments.webshop import store as store_module
from envfleet.llm.environments.webshop.catalogue import (
    Instruction,
    Product,
    price_cap,
    prices_of,
    product_of,
    products_of,
)
from envfleet.llm.environments.webshop.generator import generate
from envfleet.llm.environments.webshop.goals import GoalWriter, combination_of, goal_place, shuffled
from envfleet.llm.environments.webshop.json_stream import items_of, pairs_of
from envfleet.llm.environments.webshop.sources import GeneratedSource, SourceFiles
from envfleet.llm.environments.webshop.store import Store, open_store, prepare
from envfleet.observe.progress import Silent

ROOT = Path(__file__).resolve().parents[3]


def real_data() -> Path:
    folder = Path(os.environ.get("ENVFLEET_DATA") or ROOT.parent / "shared" / "data") / "webshop"
    if not (folder / "documents_100.jsonl").is_file():
        pytest.skip("the real products are not here")
    return folder


class TestRows:
    @pytest.mark.parametrize(
        ("pricing", "prices"),
        [
            ("$5.99", [5.99]),
            ("$5.99$8.49", [5.99, 8.49]),
            ("$1,299.00", [1299.0]),
            ("$3$4$5", [3.0, 4.0]),
            ([877.8], [877.8]),
            ([19.99, 27.99], [19.99, 27.99]),
            (7, [7.0]),
            ("", [100.0]),
            ([], [100.0]),
            (None, [100.0]),
            ("$", [100.0]),
            ("$1.2.3", [100.0]),
            ("call us", [100.0]),
            (float("nan"), [100.0]),
            ({"a": 1}, [100.0]),
        ],
    )
    def test_prices_in_every_form(self, pricing, prices):
        assert prices_of(pricing) == prices

    def test_options_in_every_form(self):
        options = {
            "Color": [{"value": " Black/White "}, {"value": "RED", "image": None}, {}, None],
            "Size": None,
            "Style": [],
        }
        product = product_of({"asin": "B1", "customization_options": options})
        assert product is not None
        assert product.options == {"color": ["black | white", "red"]}
        nothings: tuple[Any, ...] = ("", None, [], 3)
        for nothing in nothings:
            product = product_of({"asin": "B1", "customization_options": nothing})
            assert product is not None
            assert product.options == {}

    def test_rows_without_a_usable_id_and_second_ones_are_left_out(self):
        asins = ["B1", "nan", "B12345678901", "B1", None, 5, "", "B2"]
        rows: list[Any] = [
            ({"asin": asin, "name": str(n)}, None, None) for n, asin in enumerate(asins)
        ]
        rows.append((None, None, None))
        assert [(p.asin, p.title) for p in products_of(iter(rows))] == [("B1", "0"), ("B2", "7")]

    def test_what_is_missing_has_a_stand_in(self):
        product = product_of({"asin": "B1", "small_description": "one", "images": None})
        assert product is not None
        assert product.attributes == ["DUMMY_ATTR"]
        assert product.bullets == ["one"]
        assert product.price_tag == "$100.0"
        assert product.rating == "N.A."
        assert product.wanted is None

    @given(st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=8,
    ), st.sampled_from((
        "name", "full_description", "small_description", "pricing", "product_category", "category",
        "query", "customization_options", "options", "Attributes", "Reviews", "instructions",
    )))  # fmt: skip
    def test_any_value_anywhere_becomes_a_product_that_is_read_back(self, value, key):
        for about in (
            {},
            {"attributes": value},
            {"instruction": "x", "instruction_attributes": value},
        ):
            product = product_of({"asin": "B1", key: value}, about, value)
            assert product is not None
            assert Product.from_bytes(product.to_bytes()).to_bytes() == product.to_bytes()
            assert product.searchable == product.searchable.lower()

    def test_prices_and_caps_are_the_same_in_every_process(self):
        product = Product("B1", "x", prices=(10.0, 20.0))
        assert product.price == pytest.approx(12.1494, abs=1e-4)
        caps = [price_cap(14.0, str(key)) for key in range(300)]
        assert set(caps) == {30.0, 40.0, 50.0}
        assert price_cap(985.0, "x") == 1_000_000.0


class TestStreams:
    @given(st.lists(st.recursive(
        st.none() | st.integers() | st.text(max_size=9), lambda inner: st.lists(inner, max_size=3)
    ), max_size=9), st.integers(1, 40))  # fmt: skip
    def test_arrays_and_objects_are_read_whatever_the_chunk(self, values, chunk):
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_stream_module, "CHUNK", chunk)
            path = Path(folder) / "x.json"
            path.write_text(json.dumps(values, indent=1))
            assert list(items_of(path)) == values
            pairs = {str(number): value for number, value in enumerate(values)}
            path.write_text(json.dumps(pairs))
            assert dict(pairs_of(path)) == pairs

    @pytest.mark.parametrize("text", ["", "{}", "[1 2]", "[1,", "[nope]", '["', "[" * 100_000])
    def test_a_file_that_is_no_array_is_named(self, tmp_path, text):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ConfigError, match=r"x\.json is not the JSON"):
            list(items_of(tmp_path / "x.json"))

    @pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
    def test_a_file_in_another_encoding_is_named(self, tmp_path, name):
        (tmp_path / name).write_bytes('["caf\xe9"]'.encode("latin-1"))
        with pytest.raises(ConfigError, match=rf"{name} is not the JSON it should be: .*utf-8"):
            list(items_of(tmp_path / name))

    def test_the_mark_that_some_editors_write_is_passed_over(self, tmp_path):
        for name in ("x.json", "x.jsonl"):
            (tmp_path / name).write_text("[1]", encoding="utf-8-sig")
        (tmp_path / "y.json").write_text('{"a": 1}', encoding="utf-8-sig")
        assert list(items_of(tmp_path / "x.json")) == [1]
        assert list(items_of(tmp_path / "x.jsonl")) == [[1]]
        assert list(pairs_of(tmp_path / "y.json")) == [("a", 1)]

    def test_a_bad_line_is_named(self, tmp_path):
        (tmp_path / "x.jsonl").write_text('{"a": 1}\n\nnope\n')
        with pytest.raises(ConfigError, match=r"x\.jsonl:3 is not JSON"):
            list(items_of(tmp_path / "x.jsonl"))


class TestGenerator:
    def test_a_seed_gives_the_same_rows_and_a_small_catalogue_begins_a_large_one(self):
        rows = list(generate(40, 7))
        assert rows[:20] == list(generate(20, 7)) != list(generate(20, 8))

    def test_ids_are_never_alike(self):
        asins = [item["asin"] for item, _, _ in generate(3000, 1)]
        assert len(set(asins)) == 3000
        assert all(len(asin) == 10 for asin in asins)

    def test_rows_have_the_irregular_forms_of_real_ones(self):
        rows = list(generate(500, 0))
        items = [item for item, _, _ in rows]
        share = {
            "no price": sum(not item["pricing"] for item in items),
            "range": sum(item["pricing"].count("$") == 2 for item in items),
            "no options": sum(item["customization_options"] == "" for item in items),
            "one bullet": sum(isinstance(item["small_description"], str) for item in items),
            "instruction": sum("instruction" in about for _, about, _ in rows),
            "human": sum(bool(human) for _, _, human in rows),
        }
        assert all(10 <= count <= 490 for count in share.values()), share

    def test_its_files_are_the_catalogue_it_generates(self, tmp_path):
        write_catalogue(tmp_path, 120, 3)
        items = tmp_path / "items_shuffle.json"
        assert len(json.loads(items.read_text())) == 120
        files = SourceFiles(
            items, tmp_path / "items_ins_v2.json", tmp_path / "items_human_ins.json"
        )
        stores = [
            Store(prepare(source, tmp_path / "cache"))
            for source in (files, GeneratedSource(120, 3))
        ]
        assert stores[0].folder != stores[1].folder
        for number in range(120):
            assert stores[0].product(number) == stores[1].product(number)
        assert stores[0].num_goals == stores[1].num_goals
        for name in ("posting_docs.npy", "posting_weights.npy", "terms.bin", "human_goals.npy"):
            one, other = ((store.folder / name).read_bytes() for store in stores)
            assert one == other


class TestStore:
    def test_is_built_once_and_opened_once(self, tmp_path, monkeypatch):
        config = WebShopConfig(num_products=30, cache_dir=str(tmp_path))
        folder = prepare_catalogue(config)
        monkeypatch.setattr(store_module, "build", None)
        assert prepare_catalogue(config) == folder
        store = open_store(folder)
        assert open_store(folder) is store
        assert store.num_products == 30
        assert not list(tmp_path.glob("*.building"))

    def test_a_build_that_fails_leaves_nothing_that_could_be_opened(self, tmp_path, monkeypatch):
        def fail(*_):
            raise RuntimeError("power cut")

        with monkeypatch.context() as patch:
            patch.setattr(GoalWriter, "finish", fail)
            with pytest.raises(RuntimeError, match="power cut"):
                prepare(GeneratedSource(5, 0), tmp_path)
        assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
        assert Store(prepare(GeneratedSource(5, 0), tmp_path)).num_products == 5

    def test_what_a_killed_builder_left_is_cleared_away(self, tmp_path):
        left = tmp_path / f"{GeneratedSource(5, 0).digest()}-v{store_module.VERSION}.x.building"
        left.mkdir()
        (left / "products.bin").write_bytes(b"half")
        prepare(GeneratedSource(5, 0), tmp_path)
        assert not left.exists()

    def test_a_damaged_store_is_built_again(self, tmp_path):
        source = GeneratedSource(5, 0)
        folder = prepare(source, tmp_path)
        whole = {path.name: path.read_bytes() for path in folder.iterdir()}
        held = Store(folder)
        others = bytes(byte ^ 1 for byte in whole["products.bin"])
        for name, damaged in [
            ("terms.bin", b""),
            ("products.bin", others),
            ("posting_docs.npy", None),
            ("about.json", b"{"),
        ]:
            (folder / name).unlink()
            if damaged is not None:
                (folder / name).write_bytes(damaged)
            with pytest.warns(RuntimeWarning, match="is damaged .*it is built again"):
                assert prepare(source, tmp_path) == folder
            now = {path.name: path.read_bytes() for path in folder.iterdir()}
            assert {**now, "about.json": b""} == {**whole, "about.json": b""}
        assert held.product(0) == Store(folder).product(0)
        assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".lock"]

    def test_whoever_waited_for_a_builder_takes_what_was_built(self, tmp_path, monkeypatch):
        locked = store_module._locked

        @contextmanager
        def after_another(lock):
            with monkeypatch.context() as patch:
                patch.setattr(store_module, "_locked", locked)
                prepare(GeneratedSource(5, 0), tmp_path)
            monkeypatch.setattr(store_module, "build", None)
            with locked(lock):
                yield

        monkeypatch.setattr(store_module, "_locked", after_another)
        assert Store(prepare(GeneratedSource(5, 0), tmp_path)).num_products == 5

    def test_another_source_is_another_store(self, tmp_path):
        write_catalogue(tmp_path, 5, 0)
        items = tmp_path / "items_shuffle.json"
        digests = {
            GeneratedSource(5, 0).digest(),
            GeneratedSource(5, 1).digest(),
            GeneratedSource(6, 0).digest(),
            SourceFiles(items).digest(),
            SourceFiles(items, num_products=4).digest(),
            SourceFiles(items, tmp_path / "items_ins_v2.json").digest(),
        }
        assert len(digests) == 6

    def test_a_file_that_has_changed_is_read_again(self, tmp_path):
        write_catalogue(tmp_path, 5, 0)
        config = WebShopConfig(file_path=str(tmp_path), dataset="full", cache_dir=str(tmp_path))
        shops = []
        for seed in (0, 1):
            write_catalogue(tmp_path, 5, seed)
            shops.append(WebShopEnv(config).reset(seed=3)[0])
        again = WebShopEnv(config)
        assert again.reset(seed=3)[0] == shops[1] != shops[0]

    def test_processes_that_want_one_store_at_once_share_it(self, tmp_path):
        context = multiprocessing.get_context("spawn")
        with context.Pool(2) as pool:
            folders = pool.starmap(prepare, [(GeneratedSource(300, 0), tmp_path)] * 2)
            pool.close()
            pool.join()
        assert len(set(folders)) == 1
        assert Store(folders[0]).num_products == 300

    def test_progress_is_told(self, tmp_path):
        seen = []

        class Told(Silent):
            def advance(self, num: int = 1) -> None:
                seen.append(num)

        prepare(GeneratedSource(1000, 0), tmp_path, Told())
        assert seen == [1000]


class TestGoals:
    def test_combinations_are_those_of_itertools(self):
        options = {"size": ["s", "m"], "color": ["r", "g", "b"]}
        expected = [dict(zip(("color", "size"), one, strict=True))
                    for one in every_combination(options["color"], options["size"])]  # fmt: skip
        assert [combination_of(options, number) for number in range(6)] == expected
        assert combination_of({}, 0) == {}

    def test_the_shuffle_is_that_of_a_list(self):
        numbers = list(range(50))
        random.Random(233).shuffle(numbers)
        assert shuffled(50, 233).tolist() == numbers

    def test_the_split_of_more_than_1500(self):
        assert goal_place(501, "test", 2000) == 1
        assert goal_place(1003, "val", 2000) == 503
        assert goal_place(503, "train", 2000) == 1503

    @given(st.integers(1, 3000))
    def test_modes_share_no_goal_unless_there_are_too_few(self, num):
        modes: tuple[Mode, ...] = ("test", "val", "train")
        spans = [{goal_place(seed, mode, num) for seed in range(num)} for mode in modes]
        assert all(0 <= place < num for span in spans for place in span)
        if num >= 3:
            assert sum(map(len, spans)) == len(set().union(*spans)) == num

    def test_words_of_a_synthetic_goal(self, tmp_path):
        store = Store(prepare(GeneratedSource(60, 0), tmp_path))
        for number in range(store.num_goals["synthetic"]):
            goal = store.goal(number)
            assert isinstance(goal.options, dict)
            for name, value in goal.options.items():
                assert f"{name}: {value}" in goal.text
            if goal.price_upper < 1e6:
                assert goal.text.endswith(f", and price lower than {goal.price_upper:.2f} dollars")

    def test_words_of_a_human_goal(self, tmp_path):
        item = {"asin": "B1", "name": "x", "pricing": "$5"}
        rows = [{"instruction": "i want it.", "instruction_attributes": ["a"],
                 "instruction_options": ["red"]},
                {"instruction": "nothing to check", "instruction_attributes": []}]  # fmt: skip
        (tmp_path / "items.json").write_text(json.dumps([item]))
        (tmp_path / "items_human_ins.json").write_text(json.dumps({"B1": rows}))
        files = SourceFiles(tmp_path / "items.json", human=tmp_path / "items_human_ins.json")
        store = Store(prepare(files, tmp_path))
        assert store.num_goals == {"synthetic": 0, "human": 1}
        goal = store.goal(0, is_human=True)
        assert goal.text.startswith("i want it, and price lower than ")
        assert goal.options == ["red"]

    def test_some_goals_by_filter_and_limit(self, tmp_path):
        store = Store(prepare(GeneratedSource(100, 0), tmp_path))
        everything = store.goals()
        tops = store.goals(filter_goals=lambda number, goal: goal.category == "fashion")
        assert 0 < len(tops) < len(everything)
        assert {store.goal(int(number)).category for number in tops.order} == {"fashion"}
        few = store.goals(limit=10)
        assert len(few) == len(set(few.order.tolist())) == 10
        assert store.goals(limit=10) is few
        assert len(store.goals(limit=10**9)) == len(everything)

    def test_rare_attributes_weigh_more(self, tmp_path):
        writer = GoalWriter()
        wanted = [(["a", "b"], {"size": ["s", "m"]}), (["a"], {}), (["c"], {})]
        for number, (attributes, options) in enumerate(wanted):
            goal = Instruction("x", attributes)
            writer.add(number, Product(str(number), "x", options=options, wanted=goal))
        assert writer.finish(tmp_path) == {"synthetic": 4, "human": 0}
        numbers = np.load(tmp_path / "synthetic_goals.npy")[:, 0].tolist()
        weights = np.load(tmp_path / "synthetic_weights.npy").tolist()
        expected = {0: (1 / 3 + 1 / 2) / 2, 1: 1 / 3, 2: 1.0}
        assert weights == pytest.approx([expected[number] for number in numbers])

    def test_no_goals_is_an_error_that_says_what_to_give(self, tmp_path):
        (tmp_path / "items.json").write_text(json.dumps([{"asin": "B1"}]))
        store = Store(prepare(SourceFiles(tmp_path / "items.json"), tmp_path))
        with pytest.raises(ConfigError, match="attr_path"):
            store.goals().number(0, "train")


class TestRealData:
    def test_counts_are_those_of_the_data(self, tmp_path):
        config = WebShopConfig(
            file_path=str(real_data() / "documents_100.jsonl"), cache_dir=str(tmp_path)
        )
        store = Store(prepare_catalogue(config))
        products = [store.product(number) for number in range(store.num_products)]
        assert len(products) == 100
        assert sum(product.wanted is not None for product in products) == 44
        assert sum(bool(product.options) for product in products) == 39
        assert sum(len(product.prices) == 2 for product in products) == 13
        assert store.num_goals == {"synthetic": 501, "human": 1}

    def test_they_are_shopped_for(self, tmp_path):
        """Goals are met by their own products, and any way through the shop can be gone."""
        config = WebShopConfig(
            file_path=str(real_data() / "documents_100.jsonl"), cache_dir=str(tmp_path)
        )
        env, rewards = WebShopEnv(config), []
        for seed in range(100):
            draw = random.Random(seed)
            env.reset(seed=seed)
            env.step(f"search[{env.goal.title}]")
            env.step(f"click[{env.goal.asin}]")
            assert isinstance(env.goal.options, dict)
            for value in env.goal.options.values():
                assert env.step(f"click[{value}]")[4]["action_is_valid"], value
            rewards.append(env.step("click[buy now]")[1])
            env.reset(seed=seed)
            terminated = False
            while not terminated and draw.random() < 0.95:
                action = draw.choice(env.available_actions()).replace("<content>", "the best")
                *_, terminated, _, info = env.step(action)
                assert info["action_is_valid"]
        assert sum(reward == 1.0 for reward in rewards) >= 95, rewards

    def test_the_searched_text_is_that_of_the_index(self):
        for row in items_of(real_data() / "documents_100.jsonl"):
            product = product_of(row)
            assert product is not None
            assert product.searchable.split() == row["contents"].split()

    def test_a_product_is_found_by_its_title(self, tmp_path):
        config = WebShopConfig(
            file_path=str(real_data() / "documents_100.jsonl"), cache_dir=str(tmp_path)
        )
        store = Store(prepare_catalogue(config))
        first = [store.index.search(store.product(n).title, 1) == [n] for n in range(100)]
        assert sum(first) >= 97
