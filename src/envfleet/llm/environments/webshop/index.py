"""Search by words: BM25 over postings on disk.

Law: results depend on the products and the words only; products of equal score are in catalogue
order. Building holds the vocabulary and one block of postings in memory. Searching maps the files,
so that all processes of a machine share the memory; it is written by hand because search libraries
hold their index in each process.

Scores are Lucene's: idf * tf / (tf + k1 * (1 - b + b * length / average length)), with the exact
length, of which Lucene keeps one byte. They are computed when the index is built.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from envfleet.llm.environments.webshop.mapped_files import bytes_of, mapped, saved
from envfleet.llm.environments.webshop.search_words import words_of

K1 = 0.9
B = 0.4

BLOCK = 2_000_000
"""Postings held while building, 10 bytes each."""

MAX_COUNT = 65535

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

_BLOCK_ROW = np.dtype([("term", np.int32), ("doc", np.int32), ("count", np.uint16)])


class IndexBuilder:
    """Takes documents in order, and writes the files of an `Index`."""

    def __init__(self, folder: Path, *, block: int = BLOCK) -> None:
        """Write to `folder`, which exists."""
        self._folder, self._block = folder, block
        self._ids: dict[str, int] = {}
        self._terms, self._docs, self._counts = array("i"), array("i"), array("H")
        self._lengths = array("i")
        self._spool = (folder / "postings.spool").open("w+b")

    def add(self, text: str, labels: Iterable[str] = ()) -> None:
        """Add the next document; `labels` are terms that do not count for its length."""
        doc = len(self._lengths)
        counts = Counter(words_of(text))
        self._lengths.append(counts.total())
        ids = self._ids
        for label in labels:
            counts[label] = 1
        self._terms.extend([ids.setdefault(term, len(ids)) for term in counts])
        self._docs.extend([doc] * len(counts))
        self._counts.extend([min(count, MAX_COUNT) for count in counts.values()])
        if len(self._terms) >= self._block:
            self._flush()

    def finish(self) -> None:
        """Write the index."""
        self._flush()
        names = sorted(self._ids, key=str.encode)
        rank = np.empty(len(names), np.int32)
        for place, name in enumerate(names):
            rank[self._ids[name]] = place
        self._ids.clear()
        frequencies = np.zeros(len(names), np.int64)
        for block in self._blocks():
            frequencies += np.bincount(rank[block["term"]], minlength=len(names))
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(frequencies)))
        self._scatter(rank, starts, frequencies)
        saved(self._folder / "posting_starts.npy", starts)
        _write_names(self._folder, names)
        self.close()

    def close(self) -> None:
        """Remove the temporary file."""
        self._spool.close()
        (self._folder / "postings.spool").unlink(missing_ok=True)

    def _flush(self) -> None:
        block = np.empty(len(self._terms), _BLOCK_ROW)
        block["term"], block["doc"], block["count"] = self._terms, self._docs, self._counts
        self._spool.write(block.tobytes())
        self._terms, self._docs, self._counts = array("i"), array("i"), array("H")

    def _blocks(self) -> Iterator[npt.NDArray[np.void]]:
        self._spool.seek(0)
        while piece := self._spool.read(self._block * _BLOCK_ROW.itemsize):
            yield np.frombuffer(piece, _BLOCK_ROW)

    def _scatter(
        self,
        rank: Ints,
        starts: npt.NDArray[np.int64],
        frequencies: npt.NDArray[np.int64],
    ) -> None:
        """Write every posting to its place, block by block; documents of a term stay in order."""
        lengths = np.array(self._lengths, np.float64)
        norms = K1 * (1 - B + B * lengths / max(lengths.mean() if len(lengths) else 1.0, 1e-9))
        idf = np.log1p((len(lengths) - frequencies + 0.5) / (frequencies + 0.5))
        size = int(starts[-1])
        docs = np.lib.format.open_memmap(
            self._folder / "posting_docs.npy", "w+", np.int32, shape=(max(size, 1),)
        )
        weights = np.lib.format.open_memmap(
            self._folder / "posting_weights.npy", "w+", np.float32, shape=(max(size, 1),)
        )
        filled = starts[:-1].copy()
        for block in self._blocks():
            terms = rank[block["term"]]
            order = np.argsort(terms, kind="stable")
            terms, block = terms[order], block[order]
            here = np.bincount(terms, minlength=len(filled))
            before = np.concatenate((np.zeros(1, np.int64), np.cumsum(here)[:-1]))
            places = filled[terms] + np.arange(len(terms)) - before[terms]
            counts = block["count"].astype(np.float64)
            found = idf[terms] * counts / (counts + norms[block["doc"]])
            docs[places] = block["doc"]
            weights[places] = found
            filled += here


class Index:
    """The files of an `IndexBuilder`, mapped."""

    def __init__(self, folder: Path, num_docs: int) -> None:
        """Open the index in `folder`, which holds `num_docs` documents."""
        self.num_docs = num_docs
        self._names = bytes_of(folder / "terms.bin")
        self._name_starts = mapped(folder / "term_starts.npy")
        self._starts = mapped(folder / "posting_starts.npy")
        self._docs = mapped(folder / "posting_docs.npy")
        self._weights = mapped(folder / "posting_weights.npy")

    def search(self, text: str, num: int) -> list[int]:
        """The `num` best documents for these words, best first."""
        counts = Counter(words_of(text))
        spans = [(self._span(term), count) for term, count in counts.items()]
        spans = [(span, count) for span, count in spans if span.start < span.stop]
        if not spans:
            return []
        scores = np.zeros(self.num_docs, np.float32)
        for span, count in spans:
            weights = self._weights[span]
            weights = weights if count == 1 else weights * np.float32(count)
            np.add.at(scores, self._docs[span], weights)
        return best(scores, num)

    def labelled(self, label: str) -> Ints:
        """The documents with this label, in order."""
        found: Ints = self._docs[self._span(label)]
        return found

    def _span(self, word: str) -> slice:
        """The postings of a word, by binary search; an empty slice for an unknown word."""
        term = word.encode("utf-8", "replace")
        low, high = 0, len(self._name_starts) - 1
        while low < high:
            middle = (low + high) // 2
            if self._name(middle) < term:
                low = middle + 1
            else:
                high = middle
        if low == len(self._name_starts) - 1 or self._name(low) != term:
            return slice(0, 0)
        return slice(int(self._starts[low]), int(self._starts[low + 1]))

    def _name(self, place: int) -> bytes:
        return bytes(self._names[self._name_starts[place] : self._name_starts[place + 1]])


def best(scores: Floats, num: int) -> list[int]:
    """Places of the highest scores above zero, equal ones in order of place."""
    places = np.flatnonzero(scores > 0)
    found = scores[places]
    if num < len(places):
        # Keep all with at least the score of the last one: which of equal scores a partition puts
        # first differs between processors.
        is_in = found >= np.partition(found, len(found) - num)[len(found) - num]
        places, found = places[is_in], found[is_in]
    order = np.argsort(-found, kind="stable")[:num]
    return [int(place) for place in places[order]]


def label(kind: str, value: str) -> str:
    """The term of a label; no word has an equals sign in it."""
    return f"{kind}={value}"


def _write_names(folder: Path, names: list[str]) -> None:
    starts = array("q", [0])
    with (folder / "terms.bin").open("wb") as file:
        for name in names:
            starts.append(starts[-1] + file.write(name.encode()))
    saved(folder / "term_starts.npy", np.array(starts, np.int64))
