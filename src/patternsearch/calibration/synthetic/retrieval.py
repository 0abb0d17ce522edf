# SPDX-License-Identifier: Apache-2.0
"""Retrieval tasks: one needle in prose, one of many UUID keys, and chained variables."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise

from patternsearch.calibration.randomness import KeyedRandom
from patternsearch.calibration.synthetic.draft import Draft, place, single_turn
from patternsearch.calibration.synthetic.prose import (
    ADJECTIVES,
    NOUNS,
    paragraph_break,
    sentence,
)

__all__ = ["multikey", "needle", "variable_tracking"]

_NUM_HOPS = 4


def needle(key: tuple[str | int, ...], depth: float) -> Draft:
    """One sentence with a number, in prose; the question asks for the number."""
    random = KeyedRandom(*key, "needle")
    name = f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}"
    code = str(random.between(1_000_000, 9_999_999))
    evidence = f"The pass code of the {name} is {code}."
    question = f"What is the pass code of the {name}?"
    filler = _prose(key)
    return Draft(
        question=question,
        answer=code,
        evidence=(evidence,),
        filler=filler,
        opening_sentence=_prose((*key, "opening")),
        lead=f"\n\nThe pass code of the {name} is",
        messages=single_turn(
            "Remember the pass code in this text.\n\n",
            f"\n\n{question}",
            _with_evidence(filler, (f"{evidence} ",), (depth,)),
        ),
    )


def multikey(key: tuple[str | int, ...], depth: float) -> Draft:
    """A JSON object of UUID keys and values; the question asks for one key's value."""
    random = KeyedRandom(*key, "multikey")
    asked, value = random.uuid(), random.uuid()
    first = f'"{random.uuid()}": "{random.uuid()}"'
    question = f'What is the value of the key "{asked}"?'
    evidence = f'"{asked}": "{value}"'

    @cache
    def filler(number: int) -> str:
        pair = KeyedRandom(*key, "pair", number)
        return f',\n"{pair.uuid()}": "{pair.uuid()}"'

    body = _with_evidence(filler, (f",\n{evidence}",), (depth,))
    return Draft(
        question=question,
        answer=value,
        evidence=(evidence,),
        filler=filler,
        opening_sentence=_prose((*key, "opening")),
        lead='\n\nThe value is "',
        messages=single_turn(
            "",
            f"\n}}\n\n{question}",
            lambda num_pieces, reserve: f"\n\n{{{first}{body(num_pieces, reserve)}",
        ),
    )


def variable_tracking(key: tuple[str | int, ...], depth: float) -> Draft:
    """A chain of assignments scattered over prose; the question asks for all equal variables.

    The first link stands at ``depth``, the others spread evenly from there to the end.
    """
    random = KeyedRandom(*key, "variables")
    names = _distinct_names(random, 2 * _NUM_HOPS)
    chain, other = names[:_NUM_HOPS], names[_NUM_HOPS:]
    values = [str(random.between(10_000, 99_999)) for _ in range(2)]
    links = _chain(chain, values[0])
    decoys = _chain(other, values[1] if values[1] != values[0] else values[1][::-1] + "7")
    depths = [depth + (1 - depth) * hop / _NUM_HOPS for hop in range(_NUM_HOPS)]
    question = f"Which variables hold the value {values[0]}?"
    filler = _prose(key)
    pieces = tuple(f"{text} " for pair in zip(links, decoys, strict=True) for text in pair)
    places = tuple(d for d in depths for _ in range(2))
    return Draft(
        question=question,
        answer=", ".join(chain),
        evidence=tuple(links),
        filler=filler,
        opening_sentence=_prose((*key, "opening")),
        lead=f"\n\nThe variables that hold {values[0]} are",
        messages=single_turn(
            "Track the variables in this text.\n\n",
            f"\n\n{question}",
            _with_evidence(filler, pieces, places),
        ),
    )


def _chain(names: list[str], value: str) -> list[str]:
    links = [f"VAR {names[0]} = {value}."]
    links += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]
    return links


def _distinct_names(random: KeyedRandom, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(chr(65 + random.below(26)) for _ in range(5))] = None
    return list(names)


def _prose(key: tuple[str | int, ...]) -> Callable[[int], str]:
    @cache
    def piece(number: int) -> str:
        random = KeyedRandom(*key, "prose", number)
        return sentence(random) + paragraph_break(random)

    return piece


def _with_evidence(
    filler: Callable[[int], str], evidence: tuple[str, ...], depths: tuple[float, ...]
) -> Callable[[int, int], str]:
    def body(num_pieces: int, reserve: int) -> str:
        pieces = [filler(number) for number in range(num_pieces)]
        bounds = place([len(piece) for piece in pieces], depths, reserve)
        for text, bound in reversed(list(zip(evidence, bounds, strict=True))):
            pieces.insert(bound, text)
        return "".join(pieces)

    return body
