# SPDX-License-Identifier: Apache-2.0
"""Varied filler prose from a seeded grammar: no sentence is a constant, nothing is periodic."""

import re

from patternsearch.calibration.randomness import KeyedRandom
from patternsearch.calibration.synthetic.words import phrases, words

__all__ = [
    "ADJECTIVES",
    "NOUNS",
    "PLACES",
    "THINGS",
    "WORKERS",
    "paragraph_break",
    "sentence",
    "with_articles",
]

ADJECTIVES = words(
    """
    quiet amber brittle careful distant early faded gentle hollow iron jagged keen late
    marble narrow older pale quick rusted silver tall uneven velvet weathered yellow bronze
    copper dusty empty foreign grey heavy inland loose modest northern open patient round
    shallow southern thin upper vacant wooden broken clever damp eager famous
    """
)
NOUNS = words(
    """
    harbour lantern archive bridge orchard valley compass market station garden ledger tower
    river museum workshop letter engine violin island forest tunnel mirror kitchen anchor
    meadow canal theatre cabin glacier library quarry ferry statue terrace cellar windmill
    reservoir monastery lighthouse telescope carpet barometer corridor courtyard dictionary
    furnace gallery hammock inlet jetty kiln loom mosaic nursery observatory pavilion quay
    rooftop staircase
    """
)
WORKERS = words(
    """
    surveyor baker archivist pilot gardener tailor geologist printer sailor teacher chemist
    carpenter botanist clerk mechanic translator violinist watchmaker fisherman engineer
    nurse historian plumber astronomer librarian conductor weaver potter miller shepherd
    """
)
PLACES = words(
    """
    Aldmoor Brenta Carrow Delmere Eastwick Farrow Glenby Hartsea Ilsworth Jarrow Kelmont
    Larkhill Marrick Norvale Ostby Pellham Quenby Rothsay Selwick Tarnow Ulverby Varden
    Wexcombe Yarmley Zellin Ashgrove Birchall Cobham Dunmore Elmstead
    """
)
VERBS = words(
    """
    repaired described measured painted borrowed crossed followed inspected moved opened
    planned questioned recorded sketched traded visited weighed adjusted cleaned covered
    delivered emptied finished guarded imagined labelled mended noticed ordered polished
    """
)
THINGS = words(
    """
    maps bolts seeds coins pages ropes lenses bottles stamps tickets barrels candles crates
    drums envelopes feathers gears hinges jars keys ladders nails oars pebbles quilts rivets
    saddles tiles urns wheels
    """
)
TIMES = phrases(
    """
    at dawn
    in the long winter of {y}
    after the flood of {y}
    before the harvest
    on a Tuesday in {m}
    during the strike
    towards the end of {m}
    for the third time since {y}
    shortly before midnight
    in the first week of {m}
    when the fog lifted
    by the autumn of {y}
    """
)
MONTHS = words(
    """
    January February March April May June July August September October November December
    """
)
REASONS = phrases(
    """
    because the {n} had been closed
    although nobody had asked for {q} {t}
    so that the {w} could leave early
    while the {w2} counted {q} {t}
    since the road to {p2} was blocked
    even if the {n2} looked {a}
    until the {w2} came back from {p2}
    as the notice on the {n} demanded
    without telling the {w2}
    which surprised the people of {p2}
    """
)
OPENERS = phrases(
    """
    the {w} {v} the {a} {n} of {p}
    {q} {t} were left beside the {a} {n}
    nobody in {p} {v} the {n} so often as the {w}
    the {a} {n} stood between {p} and {p2}
    a {w} from {p} {v} {q} {t}
    the price of {t} in {p} rose to {q} crowns
    the council of {p} {v} the plan for a {a} {n}
    every {w} knew the way from the {n} to the {n2}
    it took {q} days to move the {n} to {p}
    the letter spoke of a {w}, a {w2} and {q} {t}
    there were {q} steps from the {n} down to the {n2}
    """
)
FRAMES = phrases(
    """
    {o} {e}.
    {e}, {o}.
    {o}, {r}.
    {o} {e}, {r}.
    {e}, {o}, {r}.
    {o}; {o2}.
    {o}, and {e} {o2}.
    """
)


_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")


def sentence(random: KeyedRandom) -> str:
    """Return one sentence, 8 to 40 words, without space around it."""
    frame = random.choice(FRAMES)
    text = frame.format(
        o=_fill(random, random.choice(OPENERS)),
        o2=_fill(random, random.choice(OPENERS)),
        e=_fill(random, random.choice(TIMES)),
        r=_fill(random, random.choice(REASONS)),
    )
    return with_articles(text[0].upper() + text[1:])


def with_articles(text: str) -> str:
    """Write ``an`` where the templates' ``a`` stands before a vowel."""
    return _ARTICLE.sub(r"\1n ", text)


def paragraph_break(random: KeyedRandom) -> str:
    """Return what stands between two sentences: mostly a space, at times a blank line."""
    return "\n\n" if random.below(6) == 0 else " "


def _fill(random: KeyedRandom, template: str) -> str:
    return template.format(
        a=random.choice(ADJECTIVES),
        n=random.choice(NOUNS),
        n2=random.choice(NOUNS),
        w=random.choice(WORKERS),
        w2=random.choice(WORKERS),
        p=random.choice(PLACES),
        p2=random.choice(PLACES),
        v=random.choice(VERBS),
        t=random.choice(THINGS),
        q=random.between(3, 950),
        y=random.between(1820, 1990),
        m=random.choice(MONTHS),
    )
