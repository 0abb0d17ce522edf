"""Hypothesis strategies that damage documents: their bytes, or one value in their tree."""

import copy

from hypothesis import strategies as st

__all__ = ["damaged_bytes", "damaged_documents"]

HUGE = 10**40
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 2**31, 2**63, HUGE, -HUGE, 1e308, -0.0, float("nan"), float("inf")]),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["", " ", "\x00", "..", "../../etc/passwd", "x" * 5000, "2001-01-01", "null"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=8), inner, max_size=4),
    ),
    max_leaves=8,
)


@st.composite
def damaged_bytes(draw, content):
    """Some bytes of ``content`` changed, cut or doubled, or other bytes altogether."""
    how = draw(st.sampled_from(["flip", "cut", "drop", "double", "insert", "other"]))
    if how == "other":
        return draw(st.binary(max_size=400))
    at = draw(st.integers(0, len(content)))
    end = draw(st.integers(at, min(len(content), at + 200)))
    if how == "flip":
        changed = bytearray(content)
        for place in draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=8)):
            changed[place] = draw(st.integers(0, 255))
        return bytes(changed)
    if how == "cut":
        return content[:at]
    if how == "drop":
        return content[:at] + content[end:]
    if how == "double":
        return content[:end] + content[at:]
    return content[:at] + draw(st.binary(max_size=50)) + content[at:]


def _paths(value, path=()):
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value[:3]):
            yield from _paths(inner, (*path, place))


@st.composite
def damaged_documents(draw, document):
    """One value of the tree replaced or removed, or a key added."""
    changed = copy.deepcopy(document)
    path = draw(st.sampled_from(list(_paths(document))))
    if not path:
        return draw(VALUES)
    parent = changed
    for step in path[:-1]:
        parent = parent[step]
    how = draw(st.sampled_from(["replace", "remove", "add"]))
    if how == "remove":
        del parent[path[-1]]
    elif how == "add" and isinstance(parent, dict):
        parent[draw(st.text(max_size=8))] = draw(VALUES)
    else:
        parent[path[-1]] = draw(VALUES)
    return changed
