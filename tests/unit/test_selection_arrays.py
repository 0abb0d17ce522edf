"""Reading a scores table: any row order gives the same arrays, and faults are named."""

import numpy as np
import pandas as pd
import pytest

from patternsearch.errors import ScoresError
from patternsearch.selection.reading import load_scores, scores_from_frame
from support.scores_factory import SMALL_GRID, scores_frame, write_scores


@pytest.fixture(scope="module")
def frame():
    return scores_frame(lengths=(1024, 4096), oracle_gap=0.01)


def assert_same(a, b):
    assert (a.candidates, a.layers, a.num_heads) == (b.candidates, b.layers, b.num_heads)
    for x, y in zip(a.lengths, b.lengths, strict=True):
        assert (x.length, x.sample_ids, x.sources) == (y.length, y.sample_ids, y.sources)
        for name in ("heldout", "num_tokens", "mass", "oracle", "density", "tiles", "columns"):
            np.testing.assert_array_equal(getattr(x, name), getattr(y, name), err_msg=name)


def test_arrays_hold_each_row_in_its_place(frame):
    scores = scores_from_frame(frame)
    assert scores.candidates == SMALL_GRID
    assert scores.layers == (0, 1)
    assert [length.length for length in scores.lengths] == [1024, 4096]
    for row in frame.sample(60, random_state=1).to_dict("records"):
        length = next(x for x in scores.lengths if x.length == row["length"])
        sample = length.sample_ids.index(row["sample_id"])
        matches = [
            c
            for c in scores.candidates
            if all(
                getattr(c, name, None) == (None if pd.isna(row[name]) else row[name])
                for name in ("kind", "sink", "window", "vertical", "diagonals", "blocks", "tile")
            )
        ]
        at = (sample, row["layer"], row["head"], scores.candidates.index(matches[0]))
        if row["index"] == "oracle":
            assert length.oracle[at] == row["mass_physical"]
        else:
            assert length.mass[:, *at].tolist() == [
                row[f"mass_{name}"] for name in ("physical", "q1", "q2", "q3", "q4")
            ]
            assert length.tiles[at] == row["tiles"]
        assert length.heldout[sample] == (row["split"] == "heldout")


def test_order_of_rows_within_samples_does_not_matter(frame):
    dense_first = frame.sample(frac=1.0, random_state=3)
    dense_first = dense_first.sort_values("sample_id", kind="stable")
    a, b = scores_from_frame(frame), scores_from_frame(dense_first)
    place = [b.candidates.index(candidate) for candidate in a.candidates]
    for x, y in zip(a.lengths, b.lengths, strict=True):
        order = [y.sample_ids.index(sample) for sample in x.sample_ids]
        np.testing.assert_array_equal(x.mass, y.mass[:, order][..., place])


def test_folder_of_parts_and_one_file_equal_the_frame(frame, tmp_path):
    folder = write_scores(tmp_path / "a.scores", frame)
    assert_same(load_scores(folder), scores_from_frame(frame))
    single = write_scores(tmp_path / "b.scores", frame)
    for part in single.scores.glob("*.parquet"):
        part.unlink()
    single.scores.rmdir()
    frame.to_parquet(single.scores, index=False)
    assert_same(load_scores(single.root), scores_from_frame(frame))


def test_object_columns_with_none_are_accepted(frame):
    assert_same(scores_from_frame(frame.astype(object)), scores_from_frame(frame))


def _drop(frame, mask):
    return frame[~mask]


CASES = {
    "a column is missing": (lambda f: f.drop(columns="density"), "lacks the columns density"),
    "no rows": (lambda f: f.iloc[:0], "no rows"),
    "a row is missing": (lambda f: f.drop(index=f.index[5]), "exactly one|other candidates"),
    "a row is doubled": (lambda f: pd.concat([f, f.iloc[[5]]]), "exactly one"),
    "a sample lacks a candidate": (
        lambda f: _drop(f, (f["sample_id"] == "s4096-1") & (f["blocks"] == 8).fillna(False)),
        "block_sparse.*share one grid",
    ),
    "a sample lacks a layer": (
        lambda f: _drop(f, (f["sample_id"] == "s4096-1") & (f["layer"] == 1)),
        "other layers",
    ),
    "a sample has more heads": (
        lambda f: f.assign(head=f["head"].where(f["sample_id"] != "s4096-1", f["head"] + 1)),
        "has head 3",
    ),
    "no dense": (lambda f: _drop(f, f["kind"] == "dense"), "dense is always scored"),
    "mass above one": (
        lambda f: f.assign(mass_physical=f["mass_physical"].where(f.index != 9, 1.3)),
        "mass_physical is 1.3",
    ),
    "mass not finite": (
        lambda f: f.assign(mass_physical=f["mass_physical"].where(f.index != 9, np.nan)),
        "mass_physical is nan",
    ),
    "region above one": (lambda f: f.assign(mass_q2=2.0), "region"),
    "negative tiles": (lambda f: f.assign(tiles=-1), "tiles is -1"),
    "strange index": (lambda f: f.assign(index="best"), "index best"),
    "index of a static pattern": (lambda f: f.assign(index="online"), "index none"),
    "strange split": (lambda f: f.assign(split="test"), "'test'"),
    "held-out samples only": (lambda f: f.assign(split="heldout"), "held-out samples only"),
    "not a candidate": (lambda f: f.assign(tile=f["tile"].replace(128, 96)), "no candidate"),
    "text in a number": (lambda f: f.assign(density="thin"), "not numeric"),
}


@pytest.mark.parametrize(("spoil", "message"), CASES.values(), ids=CASES)
def test_fault_is_named(frame, spoil, message):
    with pytest.raises(ScoresError, match=message):
        scores_from_frame(spoil(frame[frame["length"] == 4096].reset_index(drop=True)))


def test_missing_region_masses_are_allowed(frame):
    scores = scores_from_frame(frame.assign(mass_q1=np.nan))
    assert np.isnan(scores.lengths[0].mass[1]).all()


class TestFolder:
    @pytest.fixture
    def folder(self, frame, tmp_path):
        return write_scores(tmp_path / "x.scores", frame)

    def test_missing_folder(self, tmp_path):
        with pytest.raises(ScoresError, match="is not a folder"):
            load_scores(tmp_path / "nothing.scores")

    @pytest.mark.parametrize("name", ["samples", "run"])
    def test_missing_file(self, folder, name):
        getattr(folder, name).unlink()
        with pytest.raises(ScoresError, match=f"has no {getattr(folder, name).name}"):
            load_scores(folder)

    def test_fewer_parts_than_samples(self, folder):
        (folder.scores / f"part-{4:05d}.parquet").unlink()
        with pytest.raises(ScoresError, match=r"5 of its 6 samples \(missing: s4096-1\).*resume"):
            load_scores(folder)

    def test_no_parts(self, folder):
        for part in folder.scores.iterdir():
            part.unlink()
        with pytest.raises(ScoresError, match="no part files"):
            load_scores(folder)

    def test_part_of_another_run(self, folder, frame):
        strange = frame[frame["sample_id"] == "s4096-1"].assign(sample_id="other")
        strange.to_parquet(folder.scores / f"part-{9:05d}.parquet", index=False)
        with pytest.raises(ScoresError, match=r"does not list \(other\)"):
            load_scores(folder)

    def test_sample_in_two_parts(self, folder, frame):
        frame[frame["sample_id"] == "s4096-1"].to_parquet(
            folder.scores / f"part-{9:05d}.parquet", index=False
        )
        with pytest.raises(ScoresError, match="more than one part"):
            load_scores(folder)

    def test_truncated_part(self, folder):
        part = folder.scores / f"part-{2:05d}.parquet"
        part.write_bytes(part.read_bytes()[:200])
        with pytest.raises(ScoresError, match="cannot be read as Parquet"):
            load_scores(folder)
