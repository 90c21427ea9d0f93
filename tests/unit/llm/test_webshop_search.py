"""WebShop's search: stems, words, scores and fuzzy matches, each against its definition."""

import math
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfleet.llm.environments.webshop.index import K1, B, Index, IndexBuilder, best, label
from envfleet.llm.environments.webshop.reward import similarity
from envfleet.llm.environments.webshop.search_words import stem, words_of

# The examples of the paper, step by step, as the whole algorithm leaves them.
STEMS = """
caresses caress ponies poni ties ti caress caress cats cat feed feed agreed agre plastered plaster
bled bled motoring motor sing sing conflated conflat troubled troubl sized size hopping hop
tanned tan falling fall hissing hiss fizzed fizz failing fail filing file happy happi sky sky
relational relat conditional condit rational ration digitizer digit conformabli conform
radicalli radic differentli differ vileli vile analogousli analog vietnamization vietnam
predication predic operator oper feudalism feudal decisiveness decis hopefulness hope
callousness callous formaliti formal sensitiviti sensit sensibiliti sensibl triplicate triplic
formative form formalize formal electriciti electr electrical electr hopeful hope goodness good
revival reviv allowance allow inference infer airliner airlin gyroscopic gyroscop
adjustable adjust defensible defens irritant irrit replacement replac adjustment adjust
dependent depend adoption adopt communism commun activate activ angulariti angular
homologous homolog effective effect bowdlerize bowdler probate probat rate rate cease ceas
controll control roll roll generalizations gener oscillators oscil shirts shirt curtains curtain
dresses dress boxes box washable washabl washing wash
"""


def test_words_have_the_stems_of_the_paper():
    words = STEMS.split()
    expected = dict(zip(words[::2], words[1::2], strict=True))
    assert {word: stem(word) for word in expected} == expected


@given(st.text("abceilmnosty1é\u2019", max_size=30))
def test_any_word_has_a_stem_that_is_not_longer(word):
    assert len(stem(word)) <= len(word) + 1
    assert stem(word[:2]) == word[:2]


def test_words_are_lower_case_without_stop_words_and_possessives():
    found = words_of("The Men's 2.5 oz BOTTLES, 1,000 pieces of it; quick-drying")
    assert found == ["men", "2.5", "oz", "bottl", "1,000", "piec", "quick", "dry"]
    assert words_of("to be or not to be") == []


DOCS = st.lists(st.lists(st.sampled_from(["red", "blue", "green", "tall", "wide"]), max_size=8))


def test_the_constants_are_those_of_the_original():
    assert (K1, B) == (0.9, 0.4)


def by_definition(docs, query, num):
    """Score every document for itself, from the formula."""
    average = sum(len(doc) for doc in docs) / max(len(docs), 1)
    scores = []
    for number, doc in enumerate(docs):
        total = 0.0
        for word in query:
            count, having = doc.count(word), sum(word in other for other in docs)
            if count:
                idf = math.log(1 + (len(docs) - having + 0.5) / (having + 0.5))
                total += idf * count / (count + K1 * (1 - B + B * len(doc) / average))
        if total:
            scores.append((-total, number))
    return sorted(scores)[:num]


@settings(max_examples=60)
@given(DOCS, st.lists(st.sampled_from(["red", "blue", "tall", "pink"]), max_size=4), st.data())
def test_scores_are_bm25_whatever_the_block(docs, query, data):
    with tempfile.TemporaryDirectory() as folder:
        builder = IndexBuilder(Path(folder), block=data.draw(st.integers(1, 30)))
        for doc in docs:
            builder.add(" ".join(doc))
        builder.finish()
        found = Index(Path(folder), len(docs)).search(" ".join(query), 3)
    expected = by_definition(docs, query, len(docs))
    scores = {number: -score for score, number in expected}
    assert len(found) == min(3, len(expected))
    # Equal scores may differ in the last digit of float32, so what must hold is the scores' order.
    np.testing.assert_allclose(
        [scores[number] for number in found], [-s for s, _ in expected[:3]], rtol=1e-5
    )


def test_equal_scores_stand_in_catalogue_order():
    scores = np.array([1, 3, 0, 3, 1, 1, 2], np.float32)
    assert best(scores, 4) == [1, 3, 6, 0]
    assert best(scores, 100) == [1, 3, 6, 0, 4, 5]
    assert best(np.zeros(5, np.float32), 3) == []


def test_labels_find_whole_documents_and_words_never_find_labels(tmp_path):
    builder = IndexBuilder(tmp_path)
    builder.add("a red shirt", [label("c", "fashion"), label("a", "machine wash")])
    builder.add("fashion for the garden", [label("c", "garden")])
    builder.finish()
    index = Index(tmp_path, 2)
    assert index.labelled(label("a", "machine wash")).tolist() == [0]
    assert index.labelled(label("c", "none")).tolist() == []
    assert index.search("fashion", 5) == [1]
    assert index.search("c=fashion", 5) == [1]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", *[".npy"] * 4]


def test_an_empty_catalogue_is_searched_in_vain(tmp_path):
    IndexBuilder(tmp_path).finish()
    assert Index(tmp_path, 0).search("anything", 5) == []


@pytest.mark.parametrize(
    ("one", "other", "ratio"),
    [
        ("large", "size x-large", 100),
        ("Gluten-Free", "free gluten", 100),
        ("red", "blue", 29),
        ("", "", 0),
        ("café", "caf", 100),
        ("easy to use", "easy to clean", 78),
    ],
)
def test_similarity(one, other, ratio):
    assert similarity(one, other) == similarity(other, one) == ratio


def test_repeated_words_of_a_query_count_again(tmp_path):
    builder = IndexBuilder(tmp_path)
    builder.add("red red red blue")
    builder.add("red blue blue blue")
    builder.finish()
    index = Index(tmp_path, 2)
    assert index.search("red red blue", 2) == [0, 1]
    assert index.search("blue blue red", 2) == [1, 0]
    assert Counter(index.search("red blue", 2)) == Counter([0, 1])
