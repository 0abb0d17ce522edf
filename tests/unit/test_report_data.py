"""What a page holds: exact numbers, packed small, safe inside HTML."""

import base64
import gzip
import json

import numpy as np
import pytest

from patternsearch.errors import InputError
from patternsearch.patterns.candidates import VerticalSlashLastQ
from patternsearch.report.build import compare_page, report_document, report_page
from patternsearch.report.compare import compare_document
from patternsearch.report.packing import (
    json_for_script,
    pack_floats,
    pack_fractions,
    pack_integers,
)
from patternsearch.report.page import render_page, write_page
from patternsearch.report.words import pattern_document
from patternsearch.schema.io import dump_config
from patternsearch.selection.aggregate import aggregate
from patternsearch.selection.options import SelectionOptions
from patternsearch.selection.reading import load_scores
from support.configs import make_config
from support.report_scores import write_calibration
from support.timings_factory import timing_table

DTYPES = {"f32": "<f4", "i16": "<i2", "u16": "<u2"}


def unpacked(packed):
    """Read a packed array as the page's script does."""
    dtype = np.dtype(DTYPES[packed["type"]])
    planes = np.frombuffer(gzip.decompress(base64.b64decode(packed["data"])), np.uint8)
    values = np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).view(dtype)
    values = values.reshape(packed["shape"])
    if packed["type"] == "u16":
        return np.where(values == 65535, np.nan, values * packed["scale"])
    return values


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A calibration with a sliding layer and a name that tries to be markup."""
    path = tmp_path_factory.mktemp("report") / "x.yaml"
    config = write_calibration(
        path,
        num_layers=3,
        layer_types=["full", "sliding", "full"],
        lengths=(1024, 4096),
        options=SelectionOptions(target_mass=0.9),
        reference="</script><img src=x onerror=alert(1)>",
    )
    return path, config


@pytest.fixture(scope="module")
def document(calibrated):
    path, config = calibrated
    return report_document(config, path)


@pytest.mark.parametrize("shape", [(0,), (7,), (3, 0, 2), (2, 3, 5)])
def test_packed_arrays_come_back(shape):
    rng = np.random.default_rng(0)
    floats = rng.normal(size=shape).astype(np.float32)
    integers = rng.integers(-1, 3000, shape)
    fractions = rng.random(shape)
    if floats.size:
        floats.reshape(-1)[0] = fractions.reshape(-1)[0] = np.nan
    np.testing.assert_array_equal(unpacked(pack_floats(floats)), floats)
    np.testing.assert_array_equal(unpacked(pack_integers(integers)), integers)
    np.testing.assert_allclose(unpacked(pack_fractions(fractions)), fractions, atol=8e-6)


def test_packing_refuses_what_does_not_fit():
    with pytest.raises(OverflowError, match="16 bits"):
        pack_integers([40000])
    assert np.isnan(unpacked(pack_fractions([np.inf, 0.5]))[0])


def test_packed_bytes_are_the_same_every_time():
    values = np.linspace(0, 1, 100)
    assert pack_fractions(values) == pack_fractions(values)


def test_json_cannot_leave_its_script():
    hostile = {"a": "</script><!-- ]]> & \u2028 <script>"}
    text = json_for_script(hostile)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == hostile
    with pytest.raises(ValueError, match="JSON compliant"):
        json_for_script(float("nan"))


def test_document_is_the_config(calibrated, document):
    _, config = calibrated
    view = document["config"]
    choice = unpacked(view["choice"])
    density = unpacked(view["at"]["density"])
    worst = unpacked(view["at"]["mass_worst_region"])
    assert view["layer_types"] == ["full", "sliding", "full"]
    assert (choice[1] == -1).all()
    assert np.isnan(density[:, 1]).all()
    for layer in (0, 2):
        for head, entry in enumerate(config.heads[layer]):
            assert view["patterns"][choice[layer, head]] == pattern_document(entry.pattern)
            for k, at in enumerate(entry.lengths):
                assert density[k, layer, head] == np.float32(at.density)
                assert worst[k, layer, head] == np.float32(at.mass_worst_region)
    assert document["headline"]["worst_mass"] == min(
        at.mass_worst_region for heads in config.heads for e in heads or () for at in e.lengths
    )
    assert view["measured"] is False
    assert document["headline"]["speed_up"] is None


def test_curves_are_the_aggregated_scores(calibrated, document):
    path, config = calibrated
    scores = load_scores(path.with_suffix(".scores"))
    table = aggregate(scores).set_index(["length", "layer", "head"])
    view = document["scores"]
    arrays = {name: unpacked(view[name]) for name in ("mean", "worst", "density", "oracle")}
    for k, length in enumerate(view["lengths"]):
        for place, layer in enumerate(view["layers"]):
            for head in range(4):
                rows = table.loc[(length, layer, head)]
                for name, column in (
                    ("mean", "mass_mean"), ("worst", "mass_worst_region"),
                    ("density", "density"), ("oracle", "oracle_mean"),
                ):  # fmt: skip
                    np.testing.assert_allclose(
                        arrays[name][k, place, head], rows[column].to_numpy(float), atol=2e-5
                    )
    chosen = unpacked(view["chosen"])
    for place, layer in enumerate(view["layers"]):
        for head, entry in enumerate(config.heads[layer]):
            assert view["candidates"][chosen[place, head]] == pattern_document(entry.pattern)


def test_samples_are_the_chosen_patterns_masses(calibrated, document):
    path, _ = calibrated
    scores = load_scores(path.with_suffix(".scores"))
    mass = unpacked(document["scores"]["sample_mass"])
    chosen = unpacked(document["scores"]["chosen"])
    assert len(document["scores"]["samples"]) == mass.shape[0] == 10
    expected = scores.lengths[1].mass[2, 3, 1, 2, chosen[1, 2]]
    assert mass[5 + 3, 1, 2, 2] == pytest.approx(expected, abs=2e-5)


def test_oracle_gap_is_over_the_same_samples(calibrated, document):
    path, config = calibrated
    table = aggregate(load_scores(path.with_suffix(".scores")))
    gaps = unpacked(document["config"]["oracle_gap"])
    for head, entry in enumerate(config.heads[2]):
        rows = table[(table.layer == 2) & (table["head"] == head) & (table.length == 4096)]
        names = [n for n in entry.pattern.model_dump() if n in rows.columns]
        for name in names:
            rows = rows[rows[name] == getattr(entry.pattern, name)]
        expected = float(rows["oracle_gap"].iloc[0])
        np.testing.assert_allclose(gaps[1, 2, head], expected, atol=2e-6)


def test_times_come_from_the_table_or_not_at_all(calibrated, tmp_path, document):
    from patternsearch.timing.table import dump_timings

    path, config = calibrated
    table = tmp_path / "gpu.json"
    dump_timings(timing_table(), table)
    timed = report_document(config, path, timings=table, serve_dtype="bfloat16")
    assert (timed["scores"]["unit"], timed["scores"]["measured"]) == ("ms", True)
    assert timed["scores"]["device"] == "Made-up GPU"
    assert (document["scores"]["unit"], document["scores"]["measured"]) == ("pairs", False)
    assert timed["config"]["measured"] is False


def test_scores_of_another_run_are_refused(calibrated, tmp_path):
    path, config = calibrated
    other = tmp_path / "y.yaml"
    write_calibration(other, lengths=(1024,), num_layers=2)
    with pytest.raises(InputError, match="another calibration"):
        report_document(config, path, scores=other.with_suffix(".scores"))


def test_a_config_without_scores_says_so(tmp_path):
    path = tmp_path / "x.yaml"
    dump_config(make_config(), path)
    page = report_document(make_config(), path)
    assert page["scores"] is None
    assert any("No scores folder" in note for note in page["notes"])


def test_page_is_one_file_without_addresses(calibrated):
    page = report_page(calibrated[0])
    head, _, rest = page.partition("<body>")
    markup = rest.partition('<script type="application/json"')[0]
    assert "onerror" not in markup.replace("onerror=alert(1)&gt;", "")
    assert "<img" not in markup
    assert "&lt;/script&gt;&lt;img" in markup
    assert "connect-src &#39;none&#39;" in head or "connect-src 'none'" in head
    for needle in ('src="http', 'href="http', "@import", "url(http"):
        assert needle not in head + markup
    assert page.count("</html>") == 1
    assert page == report_page(calibrated[0])


def test_write_page_replaces_pages_only(tmp_path):
    path = tmp_path / "page.html"
    html = render_page("report", "x", {})
    write_page(html, path)
    write_page(html, path)
    assert path.read_text() == html
    other = tmp_path / "other.html"
    other.write_text("mine")
    with pytest.raises(InputError, match="no page of ours"):
        write_page(html, other)
    assert other.read_text() == "mine"
    with pytest.raises(InputError, match="cannot be written"):
        write_page(html, tmp_path / "nowhere" / "page.html")


def test_compare_shows_the_diff(tmp_path):
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first = make_config(num_layers=3)
    entries = [list(heads) for heads in first.heads]
    entries[1][2] = entries[1][2].model_copy(
        update={"pattern": VerticalSlashLastQ(vertical=100, slash=200, tile=64)}
    )
    second = first.model_copy(update={"heads": tuple(map(tuple, entries))})
    dump_config(first, a)
    dump_config(second, b)
    document = compare_document(a, b)
    what = unpacked(document["maps"]["what"])
    assert np.argwhere(what != 0).tolist() == [[1, 2]]
    assert document["changes"][what[1, 2]] in ("pattern", "budget")
    side = document["maps"]["sides"][1]
    assert side["names"][unpacked(side["pattern"])[1, 2]] == "vertical_slash 100+200"
    assert compare_page(a, b).startswith("<!DOCTYPE html>")


def test_compare_of_different_shapes_has_no_map(tmp_path):
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    dump_config(make_config(num_layers=2), a)
    dump_config(make_config(num_layers=3), b)
    document = compare_document(a, b)
    assert document["maps"] is None
    assert any("shapes differ" in note for note in document["notes"])
