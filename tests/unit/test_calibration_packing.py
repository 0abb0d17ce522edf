"""Packing: exact numbers of tokens, nothing lost, nothing twice, fresh documents first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patternsearch.calibration.packing import Document, DryError, Packer, cut_text
from patternsearch.calibration.randomness import KeyedRandom


def encode(text):
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.int32)


def packer(*texts):
    return Packer(iter([Document(f"d{i}", text) for i, text in enumerate(texts)]), encode)


TEXTS = st.lists(st.text(alphabet="ab \n", max_size=40), max_size=8)


@settings(max_examples=200, deadline=None)
@given(texts=TEXTS, requests=st.lists(st.integers(1, 30), max_size=10))
def test_take_gives_exact_lengths_and_every_token_once(texts, requests):
    source = packer(*texts)
    total = sum(map(len, texts))
    seen = {}
    given_out = 0
    for request in requests:
        if given_out + request > total:
            with pytest.raises(DryError) as caught:
                source.take(request)
            assert caught.value.missing == given_out + request - total
            assert caught.value.num_tokens == total
            return
        pieces = source.take(request)
        assert sum(piece.token_ids.size for piece in pieces) == request
        given_out += request
        for piece in pieces:
            assert piece.token_ids.size > 0
            text = texts[int(piece.document[1:])]
            end = piece.start + piece.token_ids.size
            assert np.array_equal(piece.token_ids, encode(text[piece.start : end]))
            positions = seen.setdefault(piece.document, set())
            assert positions.isdisjoint(range(piece.start, end))
            positions.update(range(piece.start, end))


@settings(max_examples=100, deadline=None)
@given(texts=TEXTS)
def test_take_everything_is_the_concatenation(texts):
    total = sum(map(len, texts))
    if total:
        pieces = packer(*texts).take(total)
        assert np.array_equal(
            np.concatenate([piece.token_ids for piece in pieces]), encode("".join(texts))
        )


def test_take_prefers_documents_that_were_not_used():
    source = packer("a" * 10, "b" * 10, "c" * 10)
    used = [[(p.document, p.start) for p in source.take(4)] for _ in range(7)]
    assert used[:3] == [[("d0", 0)], [("d1", 0)], [("d2", 0)]]
    assert used[3:6] == [[("d0", 4)], [("d1", 4)], [("d2", 4)]]
    assert used[6] == [("d0", 8), ("d1", 8)]


def test_take_reads_no_more_documents_than_needed():
    read = []

    def documents():
        for i in range(100):
            read.append(i)
            yield Document(f"d{i}", "xxxxx")

    Packer(documents(), encode).take(12)
    assert read == [0, 1, 2]


def test_take_tokenises_a_long_document_only_as_far_as_needed():
    sizes = []

    def counting(text):
        sizes.append(len(text))
        return encode(text)

    text = "word " * 200_000
    Packer(iter([Document("long", text)]), counting).take(10)
    assert sum(sizes) < len(text) / 10


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab \n", max_size=60), limit=st.integers(1, 20))
def test_cut_text_joined_is_the_text(text, limit):
    parts = list(cut_text(text, limit))
    assert "".join(parts) == text
    assert all(0 < len(part) <= limit for part in parts)


def test_cut_text_prefers_line_ends():
    assert list(cut_text("one two\nthree four", 12)) == ["one two\n", "three four"]


def test_keyed_random_is_pinned():
    """Changing a draw changes every recipe's samples on every machine: these values must stay."""
    random = KeyedRandom(7, "needle", "calibration", 4096, 0)
    assert [random.below(1000) for _ in range(5)] == [957, 474, 967, 184, 633]
    assert random.uuid() == "15e6230d-6dfa-4b86-96f1-7c188523a15b"
    assert random.sample("abcdef", 3) == ["c", "f", "d"]


def test_keyed_random_separates_keys():
    keys = [(1, "a"), ("1", "a"), (1, "a", ""), ("1a",), (1, "b")]
    draws = {KeyedRandom(*key).below(1 << 60) for key in keys}
    assert len(draws) == len(keys)


def test_keyed_random_is_even():
    random = KeyedRandom("even")
    counts = np.bincount([random.below(10) for _ in range(20_000)], minlength=10)
    assert counts.min() > 1800
    assert counts.max() < 2200
    assert 0.49 < np.mean([random.fraction() for _ in range(20_000)]) < 0.51
