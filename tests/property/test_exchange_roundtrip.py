"""export → import → export is byte-stable, with and without the sidecar; diff agrees."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patternsearch.exchange.consumers import CONSUMERS, entry_of, is_writable, pattern_of
from patternsearch.exchange.diff import diff_files
from patternsearch.exchange.export import export_config, write_export
from patternsearch.exchange.importing import find_own_export, import_pattern_file
from patternsearch.patterns.candidates import AShape, BlockSparse, Dense, VerticalSlashLastQ
from patternsearch.schema import io
from patternsearch.schema.config import PatternConfig
from support.configs import make_document

BUDGETS = st.sampled_from([0, 1, 29, 30, 31, 99, 100, 130, 131, 2**20]) | st.integers(0, 10**6)
VERTICAL_SLASH = st.builds(
    VerticalSlashLastQ, vertical=BUDGETS, slash=BUDGETS, tile=st.just(64), last_q=st.just(64)
)
LEGAL = {
    "minference": st.one_of(
        st.just(Dense()),
        VERTICAL_SLASH,
        st.builds(AShape, sink=BUDGETS, window=BUDGETS.map(lambda w: w + 1), tile=st.just(64)),
        st.just(BlockSparse(estimator="pooled", blocks=100, tile=64)),
    ),
    "vllm": st.just(Dense()) | VERTICAL_SLASH,
    "sglang": st.just(Dense()) | VERTICAL_SLASH,
}


@st.composite
def cases(draw):
    engine = draw(st.sampled_from(sorted(LEGAL)))
    document = make_document(2, 3, 1, lengths=(64,), consumer=engine, fingerprints=False)
    for heads in document["heads"]:
        for head in heads:
            head["pattern"] = draw(LEGAL[engine]).model_dump()
            head["lengths"][0]["mass_mean"] = draw(st.floats(0, 1))
    return engine, PatternConfig.model_validate(document)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("roundtrip")


@settings(max_examples=60, deadline=None)
@given(cases())
def test_our_own_export_comes_back_whole(folder, case):
    engine, config = case
    export = export_config(config, engine)
    path, _ = write_export(export, folder / "own.json", force=True)
    back = find_own_export(path).sidecar.config
    assert io.dumps_config(back) == io.dumps_config(config)
    again = export_config(back, engine)
    assert (again.text, again.sidecar) == (export.text, export.sidecar)
    io.dump_config(config, folder / "own.yaml")
    assert not diff_files(folder / "own.yaml", path).differs("any")


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_bare_export_comes_back_as_the_same_file(folder, case):
    engine, config = case
    path = folder / "bare.json"
    path.write_text(export_config(config, engine).text)
    imported, _ = import_pattern_file(path, engine, config.model)
    assert export_config(imported, engine).text == path.read_text()


@given(LEGAL["minference"], st.sampled_from(sorted(CONSUMERS)), st.none() | st.integers(1, 10**7))
def test_an_entry_runs_what_it_was_written_for(pattern, engine, max_positions):
    consumer = CONSUMERS[engine]
    if not is_writable(pattern, consumer):
        assert pattern.kind in ("a_shape", "block_sparse")
        return
    entry = entry_of(pattern, consumer, None, max_positions)
    runs = pattern_of(entry, consumer, max_positions)
    if isinstance(pattern, VerticalSlashLastQ) and isinstance(runs, VerticalSlashLastQ):
        least = 31 if consumer.bumped_vertical else 30
        assert runs.vertical == max(pattern.vertical, least)
        assert runs.slash == max(pattern.slash, 100)
    elif isinstance(pattern, VerticalSlashLastQ):
        assert pattern.vertical == pattern.slash == max(2**20, max_positions or 0)
    else:
        assert runs == pattern
