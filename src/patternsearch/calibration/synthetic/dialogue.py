# SPDX-License-Identifier: Apache-2.0
"""A conversation of many turns whose last question needs something said long before."""

from functools import cache

from patternsearch.calibration.randomness import KeyedRandom
from patternsearch.calibration.synthetic.draft import Draft, place
from patternsearch.calibration.synthetic.prose import (
    ADJECTIVES,
    NOUNS,
    PLACES,
    THINGS,
    WORKERS,
    sentence,
    with_articles,
)
from patternsearch.calibration.synthetic.words import phrases
from patternsearch.calibration.tokens import Message

__all__ = ["dialogue"]

_ASKS = phrases(
    """
    How would a {w} store {q} {t} near {p}?
    Could you compare a {a} {n} with a {a2} {n2}?
    I have {q} {t} and only one {n}. What should I do first?
    Write two lines about the {a} {n} of {p}.
    My {w} says the {n} needs {q} {t}. Is that too many?
    What is the shortest way from the {n} to the {n2} in {p}?
    Please sum up what we know of the {a} {n}.
    Why did people in {p} keep {t} in a {n}?
    If {q} {t} cost {q2} crowns, what do {q3} cost?
    Suggest a name for a {a} {n} run by a {w}.
    Was the {n} of {p} older than its {n2}?
    Can a {w} work alone in a {a} {n}?
    """
)
_STARTS = phrases(
    """
    Start with the {n}:
    That depends on the {w}.
    In short,
    There are two sides to it.
    Most people in {p} would say no, but
    A {w} would count the {t} first.
    Good question.
    Let me think about the {a} {n}.
    Yes, with some care:
    Going by what you told me,
    Not quite.
    As for the {t},
    """
)
_ENDS = phrases(
    """
    Shall I go on with the {n2}?
    Tell me how many {t} are left.
    -
    Does that help the {w}?
    -
    I would not trust the {a2} {n2} for that.
    Ask again if {p} is too far.
    -
    -
    """
)
_FACTS = phrases(
    """
    Before I forget, the booking number for the {x} is {c}.
    For later: my booking number for the {x} is {c}.
    Please keep in mind that the {x} has the booking number {c}.
    """
)


def dialogue(key: tuple[str | int, ...], depth: float) -> Draft:
    """A chat in which the user gives a booking number at ``depth`` and asks for it at the end."""
    random = KeyedRandom(*key, "dialogue")
    subject = f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}"
    code = f"{random.hexadecimal(2).upper()}{random.between(10_000, 99_999)}"
    evidence = random.choice(_FACTS).format(x=subject, c=code)
    question = f"What is my booking number for the {subject}?"

    @cache
    def turn(number: int) -> tuple[str, str]:
        return _ask(KeyedRandom(*key, "ask", number)), _reply(KeyedRandom(*key, "reply", number))

    def messages(opening: str, num_pieces: int, reserve: int) -> list[Message]:
        turns = [turn(number) for number in range(num_pieces)]
        noted = (evidence, f"Noted, I will remember it for the {subject}.")
        [bound] = place([len(ask) + len(reply) for ask, reply in turns], [depth], reserve)
        turns.insert(bound, noted)
        conversation: list[Message] = []
        for number, (ask, reply) in enumerate(turns):
            before = opening if number == 0 else ""
            conversation.append({"role": "user", "content": before + ask})
            conversation.append({"role": "assistant", "content": reply})
        conversation.append({"role": "user", "content": question})
        return conversation

    return Draft(
        question=question,
        answer=code,
        evidence=(evidence,),
        filler=lambda number: "\n\n".join(turn(number)),
        opening_sentence=lambda number: sentence(KeyedRandom(*key, "opening", number)) + " ",
        lead=f"Your booking number for the {subject} is",
        messages=messages,
    )


def _ask(random: KeyedRandom) -> str:
    lead = f"{sentence(random)} " if random.below(3) == 0 else ""
    return lead + _fill(random, random.choice(_ASKS))


def _reply(random: KeyedRandom) -> str:
    parts = [_fill(random, random.choice(_STARTS))]
    parts += [sentence(random) for _ in range(random.between(1, 5))]
    parts.append(_fill(random, random.choice(_ENDS)))
    return " ".join(part for part in parts if part)


def _fill(random: KeyedRandom, template: str) -> str:
    return with_articles(
        template.format(
            a=random.choice(ADJECTIVES),
            a2=random.choice(ADJECTIVES),
            n=random.choice(NOUNS),
            n2=random.choice(NOUNS),
            w=random.choice(WORKERS),
            p=random.choice(PLACES),
            t=random.choice(THINGS),
            q=random.between(2, 900),
            q2=random.between(2, 900),
            q3=random.between(2, 900),
        )
    )
