"""Timing tables as files: what is read back is what was measured, and nothing else is accepted."""

import json

import pytest

from patternsearch.errors import TimingError
from patternsearch.schema.canonical import canonical_sha256
from patternsearch.timing.table import dump_timings, kernel_digest, load_timings
from support.timings_factory import timing_table


@pytest.fixture(scope="module")
def table():
    return timing_table()


@pytest.fixture
def path(table, tmp_path):
    path = tmp_path / "gpu.json"
    dump_timings(table, path)
    return path


def test_load_gives_back_what_was_dumped(table, path, tmp_path):
    assert load_timings(path) == table
    again = tmp_path / "again.json"
    dump_timings(load_timings(path), again)
    assert again.read_bytes() == path.read_bytes()


def rewrite(path, change, *, reseal):
    document = json.loads(path.read_text())
    change(document)
    if reseal:
        document["sha256"] = canonical_sha256({k: v for k, v in document.items() if k != "sha256"})
    path.write_text(json.dumps(document))


def set_row(**values):
    return lambda document: document["rows"][7].update(values)


FAULTS = {
    "edited time": (lambda d: d["rows"][0].update(p80_ms=99.0), False, "edited or damaged"),
    "edited device": (lambda d: d.update(device="Other GPU"), False, "edited or damaged"),
    "zero time": (set_row(p20_ms=0.0, p50_ms=0.0, p80_ms=0.0), True, "p20_ms"),
    "negative time": (set_row(p20_ms=-1.0), True, "p20_ms"),
    "percentiles in disorder": (set_row(p20_ms=5e3), True, "not ascending"),
    "unknown operation": (set_row(op="attend_magic"), True, "op"),
    "unknown key": (lambda d: d.update(colour="red"), True, "colour"),
    "no rows": (lambda d: d.update(rows=[]), True, "rows"),
    "repeated row": (lambda d: d["rows"].append(d["rows"][0]), True, "two rows measure the same"),
    "attend row without tiles": (
        lambda d: next(r for r in d["rows"] if r["op"] == "attend_a_shape").update(tiles=None),
        True,
        "positive tiles",
    ),
    "heads that do not divide": (set_row(num_kv_heads=3), True, "multiple of num_kv_heads"),
    "newer version": (lambda d: d.update(schema_version=2), True, "newer than 1"),
    "another document": (lambda d: d.update(format="patternsearch/grid"), True, "expected"),
}


@pytest.mark.parametrize(("change", "reseal", "message"), FAULTS.values(), ids=FAULTS)
def test_fault_is_refused_with_its_reason(path, change, reseal, message):
    rewrite(path, change, reseal=reseal)
    with pytest.raises(TimingError, match=message):
        load_timings(path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(TimingError, match="does not exist"):
        load_timings(tmp_path / "nothing.json")


def test_output_must_be_json_and_not_foreign(table, tmp_path):
    with pytest.raises(TimingError, match="ends in"):
        dump_timings(table, tmp_path / "gpu.yaml")
    foreign = tmp_path / "package.json"
    foreign.write_text("{}")
    with pytest.raises(TimingError, match="is not a timing table"):
        dump_timings(table, foreign)
    assert foreign.read_text() == "{}"
    with pytest.raises(TimingError, match="does not exist"):
        dump_timings(table, tmp_path / "no" / "gpu.json")


def test_table_knows_whether_the_kernels_have_changed():
    assert timing_table().is_of_these_kernels
    assert not timing_table(kernel_sha256="0" * 64).is_of_these_kernels
    assert len(kernel_digest()) == 64
