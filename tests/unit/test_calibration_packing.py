"""Packing: exact numbers of tokens, nothing lost, nothing twice, fresh documents first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patternsearch.calibration.packing import Document, DryError, Packer, cut_text
from patternsearch.calibration.randomness import KeyedRandom


def encode(text):
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.int32)


def encode_all(texts):
    return [encode(text) for text in texts]


def packer(*texts, expected=0):
    documents = (Document(f"d{i}", text) for i, text in enumerate(texts))
    return Packer(documents, encode_all, expected=expected)


TEXTS = st.lists(st.text(alphabet="ab \n", max_size=40), max_size=8)


@settings(max_examples=200, deadline=None)
@given(
    texts=TEXTS,
    requests=st.lists(st.integers(1, 30), max_size=10),
    expected=st.sampled_from([0, 1, 50, 10_000]),
)
def test_take_gives_exact_lengths_and_every_token_once(texts, requests, expected):
    source = packer(*texts, expected=expected)
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


@pytest.mark.parametrize("expected", [0, 12])
def test_take_reads_no_more_documents_than_needed(expected):
    read = []

    def documents():
        for i in range(100):
            read.append(i)
            yield Document(f"d{i}", "xxxxx")

    Packer(documents(), encode_all, expected=expected).take(12)
    assert read == [0, 1, 2]


@pytest.mark.parametrize("expected", [0, 10])
def test_take_tokenises_a_long_document_only_as_far_as_needed(expected):
    sizes = []

    def counting(texts):
        sizes.extend(map(len, texts))
        return encode_all(texts)

    text = "word " * 200_000
    Packer(iter([Document("long", text)]), counting, expected=expected).take(10)
    assert sum(sizes) < len(text) / 10


@settings(max_examples=100, deadline=None)
@given(texts=TEXTS, requests=st.lists(st.integers(1, 30), max_size=6), expected=st.integers(1, 300))
def test_what_is_expected_changes_no_piece(texts, requests, expected):
    def pieces(source):
        try:
            for request in requests:
                for piece in source.take(request):
                    yield piece.document, piece.start, piece.token_ids.tolist()
        except DryError as dry:
            yield dry.missing, dry.num_documents, dry.num_tokens

    assert list(pieces(packer(*texts, expected=expected))) == list(pieces(packer(*texts)))


def test_much_to_come_is_tokenised_many_documents_at_a_time():
    calls = []

    def counting(texts):
        calls.append(len(texts))
        return encode_all(texts)

    documents = (Document(f"d{i}", "x" * 1000) for i in range(5000))
    source = Packer(documents, counting, expected=4_000_000)
    for _ in range(4000):
        source.take(1000)
    assert sum(calls) == 4000
    assert len(calls) < 10


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
