# SPDX-License-Identifier: Apache-2.0
"""A Python module in which functions are defined early and called far later."""

from collections.abc import Callable
from functools import cache

from patternsearch.calibration.randomness import KeyedRandom
from patternsearch.calibration.synthetic.draft import Draft, place, single_turn
from patternsearch.calibration.synthetic.prose import NOUNS, THINGS, sentence
from patternsearch.calibration.synthetic.words import words

__all__ = ["code"]

_VERBS = words(
    """
    adjust blend check derive expand fold gather hash insert join keep limit merge note
    order parse queue rank scale trim update verify weigh
    """
)
_PARAMETERS = words(
    """
    amount base count delta extent factor gap height index level mass offset
    """
)


def code(key: tuple[str | int, ...], depth: float) -> Draft:
    """A module that parses; the question is what a call of a function defined far above returns."""
    random = KeyedRandom(*key, "code")
    name = f"{random.choice(_VERBS)}_{random.choice(NOUNS)}_rate"
    parameter = random.choice(_PARAMETERS)
    factor, offset, argument = random.between(3, 9), random.between(11, 89), random.between(2, 9)
    evidence = f"def {name}({parameter}):\n    return {parameter} * {factor} + {offset}"
    question = f"print({name}({argument}))"

    @cache
    def function_name(number: int) -> str:
        named = KeyedRandom(*key, "name", number)
        return f"{named.choice(_VERBS)}_{named.choice(THINGS)}_{number}"

    @cache
    def filler(number: int) -> str:
        return _function(KeyedRandom(*key, "function", number), number, function_name)

    def body(num_pieces: int, reserve: int) -> str:
        pieces = [filler(number) for number in range(num_pieces)]
        [bound] = place([len(piece) for piece in pieces], [depth], reserve)
        pieces.insert(bound, f"\n\n{evidence}\n")
        return '"""\n' + "".join(pieces)

    return Draft(
        question=question,
        answer=str(argument * factor + offset),
        evidence=(evidence,),
        filler=filler,
        opening_sentence=lambda number: sentence(KeyedRandom(*key, "opening", number)) + "\n",
        lead="  # prints",
        messages=single_turn('"""', f"\n\n{question}", body),
    )


def _function(random: KeyedRandom, number: int, name_of: Callable[[int], str]) -> str:
    a, b = random.sample(_PARAMETERS, 2)
    lines = [f"\n\ndef {name_of(number)}({a}, {b}={random.between(1, 99)}):"]
    if random.below(2):
        lines.append(f'    """{sentence(random)}"""')
    lines.append(f"    total = {a} {random.choice('+-*')} {random.between(2, 999)}")
    for _ in range(random.between(0, 2)):
        lines += random.choice((_loop, _branch, _table))(random, a, b)
    for _ in range(min(number, random.between(0, 2))):
        # Uniform over everything above: most calls reach far back.
        called = name_of(random.below(number))
        lines.append(f"    total += {called}({random.choice((a, b, 'total'))})")
    lines.append(f"    return total % {random.between(101, 9999)}\n")
    return "\n".join(lines)


def _loop(random: KeyedRandom, a: str, b: str) -> list[str]:
    return [
        f"    for step in range({random.between(2, 12)}):",
        f"        total = (total * {random.between(2, 31)} + step * {random.choice((a, b))})",
    ]


def _branch(random: KeyedRandom, a: str, b: str) -> list[str]:
    return [
        f"    if {a} {random.choice('<>')} {random.between(10, 500)}:",
        f"        total -= {b} // {random.between(2, 9)}",
    ]


def _table(random: KeyedRandom, a: str, b: str) -> list[str]:
    words = random.sample(NOUNS, 3)
    pairs = ", ".join(f'"{word}": {random.between(1, 99)}' for word in words)
    return [f"    table = {{{pairs}}}", f'    total += table["{random.choice(words)}"] * {b}']
