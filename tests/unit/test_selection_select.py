"""Whole selections: what ends up in the config, under every option."""

import numpy as np
import pytest

from patternsearch.errors import InputError, ScoresError
from patternsearch.patterns.candidates import KINDS, AShape, BlockSparse, Dense, describe
from patternsearch.schema.config import BreakEven
from patternsearch.selection.entries import min_length
from patternsearch.selection.options import SelectionOptions
from patternsearch.selection.reading import scores_from_frame
from patternsearch.selection.select import select_heads
from support.scores_factory import SMALL_GRID, random_mass, scores_frame, write_scores


class SquareTimes:
    """1 ms for a million pairs, dense at half the price, and a fixed index cost of 0.5 ms."""

    unit, measured, device, sha256 = "ms", True, "Test GPU", "ab" * 32

    def head_cost(self, candidates, num_tokens, tiles, columns):
        tile = np.array([getattr(c, "tile", 0) for c in candidates])
        index = np.array([0.5 * (c.kind in ("vertical_slash", "block_sparse")) for c in candidates])
        sparse = (tiles * tile**2 + columns * tile) / 1e6 + index
        return np.where(tile == 0, num_tokens * (num_tokens + 1) / 4e6, sparse)

    def launch_cost(self, candidates, num_tokens, tiles, columns):
        return 0.25 * len(set(candidates))

    def layer_backends(self, candidates, num_tokens, tiles, columns):
        return ["dense kernel" if c == Dense() else "sparse kernel" for c in candidates]


@pytest.fixture(scope="module")
def frame():
    return scores_frame(lengths=(1024, 4096), calibration=3, heldout=1, oracle_gap=0.01)


@pytest.fixture(scope="module")
def scores(frame):
    return scores_from_frame(frame)


def entries(selected):
    return [entry for heads in selected.heads if heads is not None for entry in heads]


def test_every_head_reaches_the_target_everywhere(scores):
    selected = select_heads(scores, SelectionOptions(target_mass=0.8))
    assert {entry.pattern.kind for entry in entries(selected)} - {"dense"}
    for entry in entries(selected):
        assert [at.length for at in entry.lengths] == [1024, 4096]
        for at in entry.lengths:
            assert at.mass_worst_region >= 0.8
            assert at.heldout_worst_region >= 0.8
            assert at.mass_worst_region <= at.mass_worst <= at.mass_mean
            assert at.predicted_ms is None


def test_no_cheaper_candidate_would_have_done(scores):
    selected = select_heads(scores, SelectionOptions(target_mass=0.9, tie_tolerance=0.0))
    last = scores.lengths[-1]
    from patternsearch.selection.cost import Work

    cost = Work().head_cost(scores.candidates, 4096, last.tiles[0], last.columns[0])
    for layer in range(2):
        for head in range(3):
            chosen = selected.choice[layer, head]
            for other in range(len(scores.candidates)):
                if cost[layer, head, other] < cost[layer, head, chosen]:
                    worst = min(x.mass[:, :, layer, head, other].min() for x in scores.lengths)
                    assert worst < 0.9


def test_unreachable_target_makes_every_head_dense(scores):
    selected = select_heads(scores, SelectionOptions(target_mass=1.0))
    assert all(entry.pattern == Dense() for entry in entries(selected))
    assert all(entry.runner_up is None for entry in entries(selected))


def test_a_single_bad_heldout_region_is_enough_to_refuse(frame):
    spoilt = frame.copy()
    good = select_heads(frame, SelectionOptions(target_mass=0.8))
    chosen = good.heads[0][0].pattern
    assert chosen != Dense()
    row = spoilt[
        (spoilt["split"] == "heldout") & (spoilt["length"] == 1024) & (spoilt["layer"] == 0)
        & (spoilt["head"] == 0) & (spoilt["kind"] == chosen.kind) & (spoilt["index"] != "oracle")
    ]  # fmt: skip
    spoilt.loc[row.index, "mass_q3"] = 0.1
    assert select_heads(spoilt, SelectionOptions(target_mass=0.8)).heads[0][0].pattern != chosen
    lenient = SelectionOptions(target_mass=0.8, regions="all")
    assert (
        select_heads(spoilt, lenient).heads[0][0].pattern
        == select_heads(frame, lenient).heads[0][0].pattern
    )


def test_oracle_rows_inform_but_are_never_chosen(frame):
    better = frame.copy()
    oracle = better["index"] == "oracle"
    better.loc[oracle, ["mass_physical", "mass_q1", "mass_q2", "mass_q3", "mass_q4"]] = 1.0
    selected = select_heads(better, SelectionOptions(target_mass=1.0))
    assert all(entry.pattern == Dense() for entry in entries(selected))
    sparse = select_heads(better, SelectionOptions(target_mass=0.8))
    dynamic = [e for e in entries(sparse) if e.pattern.kind in ("vertical_slash", "block_sparse")]
    assert dynamic
    assert all(at.oracle_mean == 1.0 for entry in dynamic for at in entry.lengths)
    static = [e for e in entries(sparse) if e.pattern.kind in ("dense", "a_shape")]
    assert all(at.oracle_mean is None for entry in static for at in entry.lengths)


def test_record_says_what_was_asked(scores):
    record = select_heads(scores, SelectionOptions(target_mass=0.9, dense_layers=(1,))).record
    assert record.objective == "work"
    assert not record.measured
    assert record.timings_device is None
    assert record.min_length is None
    assert record.break_even == ()
    assert record.dense_layers == (1,)
    assert record.kinds == KINDS


def test_measured_times_are_recorded_for_every_length(scores):
    selected = select_heads(scores, SelectionOptions(target_mass=0.85), SquareTimes())
    record = selected.record
    assert (record.objective, record.measured) == ("time", True)
    assert (record.timings_device, record.timings_sha256) == ("Test GPU", "ab" * 32)
    assert [point.length for point in record.break_even] == [1024, 4096]
    for place, point in enumerate(record.break_even):
        total = sum(entry.lengths[place].predicted_ms for entry in entries(selected))
        assert point.sparse_ms == pytest.approx(total, abs=1e-5)
        dense = point.length * (point.length + 1) / 4e6 * 6
        assert point.dense_ms == pytest.approx(dense, abs=1e-5)
        layers = [{e.pattern for e in heads} for heads in selected.heads if heads is not None]
        launched = sum(0.25 * len(layer) for layer in layers if layer != {Dense()})
        assert point.launch_ms == launched > 0
    names = ["dense" if entry.pattern == Dense() else "sparse" for entry in entries(selected)]
    assert selected.backends == {f"{name} kernel": names.count(name) for name in set(names)}
    assert record.min_length == min_length(record.break_even)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1024, 2, 1), (4096, 8, 2)], 1024),
        ([(1024, 1, 2), (4096, 8, 2)], 1626),
        ([(1024, 1, 2), (4096, 2, 1)], 2048),
        ([(1024, 1, 2), (4096, 8, 9)], 4097),
        ([(1024, 2, 1), (4096, 8, 9), (8192, 9, 1)], 4244),
        ([(1024, 1, 1)], 1024),
        ([(1024, 1, 2), (4096, 2, 0)], 1024),
        ([(1024, 1, 0.1, 2), (4096, 2, 0.2, 1)], 2048),
        ([(1024, 1, 0.1, 3), (4096, 2, 0.2, 3)], 5017),
        ([(1024, 1, 2, 9), (4096, 2, 3, 1)], 4097),
        ([(1024, 1, 2, 0.1), (4096, 2, 1, 0.1)], 2048),
    ],
    ids=["always faster", "crossing", "crossing at the middle", "never faster",
         "last crossing counts", "equal is not slower", "free", "launches fall behind",
         "bound by launches", "bound by the GPU", "launches hidden"],
)  # fmt: skip
def test_min_length_is_where_dense_stops_winning(points, expected):
    names = ("length", "dense_ms", "sparse_ms", "launch_ms")
    break_even = [BreakEven(**dict(zip(names, point, strict=False))) for point in points]
    assert min_length(break_even) == expected


def test_break_even_of_ranks_is_that_of_the_slowest(scores):
    options = SelectionOptions(target_mass=0.8, tp_size=3)
    selected = select_heads(scores, options, SquareTimes())
    last = selected.record.break_even[-1]
    assert last.sparse_ms == pytest.approx(selected.ranks_after.slowest, abs=1e-6)
    assert last.dense_ms == pytest.approx(selected.dense_cost / 3, abs=1e-6)


def test_runner_up_is_what_the_rule_picks_without_the_choice(scores):
    options = SelectionOptions(target_mass=0.85)
    selected = select_heads(scores, options)
    for layer in range(2):
        for head in range(3):
            entry = selected.heads[layer][head]
            kept = [c for c in scores.candidates if c != entry.pattern]
            if entry.pattern == Dense():
                continue
            rest = scores_from_frame(
                scores_frame(
                    kept,
                    lengths=(1024, 4096),
                    calibration=3,
                    heldout=1,
                    mass=lambda rng, length, sample, lay, h, c: scores.lengths[
                        [1024, 4096].index(length)
                    ].mass[:, sample, lay, h, scores.candidates.index(c)],
                )
            )
            second = select_heads(rest, options).heads[layer][head]
            assert entry.runner_up.pattern == second.pattern
            assert entry.runner_up.mass_worst_region == second.lengths[-1].mass_worst_region


class TestRestrictions:
    def test_kinds(self, scores):
        options = SelectionOptions(target_mass=0.8, kinds=("a_shape",))
        kinds = {entry.pattern.kind for entry in entries(select_heads(scores, options))}
        assert kinds <= {"dense", "a_shape"}
        assert "a_shape" in kinds

    def test_max_density(self, scores):
        options = SelectionOptions(target_mass=0.8, max_density=0.3)
        for entry in entries(select_heads(scores, options)):
            assert entry.pattern == Dense() or all(at.density <= 0.3 for at in entry.lengths)

    def test_dense_layers(self, scores):
        selected = select_heads(scores, SelectionOptions(target_mass=0.8, dense_layers=(1,)))
        assert all(entry.pattern == Dense() for entry in selected.heads[1])
        assert any(entry.pattern != Dense() for entry in selected.heads[0])

    def test_dense_layers_must_be_scored(self, scores):
        with pytest.raises(InputError, match="dense layers 7 are not among"):
            select_heads(scores, SelectionOptions(dense_layers=(7,)))

    def test_consumer(self, scores):
        options = SelectionOptions(target_mass=0.8, consumer="minference")
        chosen = {entry.pattern for entry in entries(select_heads(scores, options))}
        assert chosen <= {Dense(), *(c for c in SMALL_GRID if isinstance(c, AShape))}

    def test_ranks_must_divide_heads(self, scores):
        with pytest.raises(InputError, match="3 query heads do not divide over 2 ranks"):
            select_heads(scores, SelectionOptions(tp_size=2))


class TestMass:
    def test_budget_in_ms_needs_measured_times(self, scores):
        options = SelectionOptions(objective="mass", target_mass=None, budget_ms=1.0)
        with pytest.raises(InputError, match="needs measured times"):
            select_heads(scores, options)

    def test_more_budget_never_gives_less_mass(self, scores):
        def mass(fraction):
            options = SelectionOptions(objective="mass", target_mass=None, budget_fraction=fraction)
            selected = select_heads(scores, options)
            assert selected.cost <= fraction * selected.dense_cost * (1 + 1e-9)
            return sum(
                min(min(a.mass_worst_region, a.heldout_worst_region) for a in entry.lengths)
                for entry in entries(selected)
            )

        values = [mass(fraction) for fraction in (0.2, 0.3, 0.5, 0.8, 1.0)]
        assert values == sorted(values)
        assert values[-1] == 6.0

    def test_record_holds_what_was_asked_for(self, scores):
        options = SelectionOptions(
            objective="mass", target_mass=None, budget_fraction=0.3, tie_tolerance=0.1
        )
        record = select_heads(scores, options).record
        assert (record.budget_fraction, record.tie_tolerance) == (0.3, 0.1)
        assert record.budget_ms is None
        by_time = select_heads(scores, SelectionOptions()).record
        assert (by_time.budget_fraction, by_time.tie_tolerance) == (None, 0.02)

    def test_upgrades_lead_to_the_next_corner_at_the_best_rate(self, scores):
        options = SelectionOptions(objective="mass", target_mass=None, budget_fraction=0.3)
        selected = select_heads(scores, options)
        rates = [upgrade.extra_mass / upgrade.extra_cost for upgrade in selected.upgrades]
        assert rates
        assert rates == sorted(rates, reverse=True)
        assert selected.shadow_price > 0
        for upgrade in selected.upgrades:
            entry = selected.heads[upgrade.layer][upgrade.head]
            assert upgrade.to == describe(entry.runner_up.pattern)

    def test_unaffordable_budget_is_refused(self, scores):
        options = SelectionOptions(objective="mass", target_mass=None, budget_fraction=0.01)
        with pytest.raises(InputError, match="raise the budget"):
            select_heads(scores, options)


def test_layers_without_scores_stay_empty(frame):
    moved = frame.assign(layer=frame["layer"] * 2 + 1)
    selected = select_heads(moved, num_layers=5)
    assert [heads is not None for heads in selected.heads] == [False, True, False, True, False]
    with pytest.raises(ScoresError, match="the model has 3 layers"):
        select_heads(moved, num_layers=3)


def test_folder_path_and_frame_select_the_same(frame, tmp_path):
    folder = write_scores(tmp_path / "x.scores", frame)
    assert select_heads(folder.root).heads == select_heads(frame).heads


def test_numbers_have_six_decimals(scores):
    for entry in entries(select_heads(scores, SelectionOptions(target_mass=0.9), SquareTimes())):
        for at in entry.lengths:
            for value in at.model_dump().values():
                assert value is None or value == round(value, 6)


def test_a_head_that_shifts_between_domains_stays_safe():
    """Local on prose, blocks on code: neither single pattern may be chosen for it."""

    def mass(rng, length, sample, layer, head, candidate):
        domain = "prose" if sample % 2 else "code"
        fits = candidate.kind == ("a_shape" if domain == "prose" else "block_sparse")
        return [0.99 if fits else 0.7] * 5

    both = scores_frame(calibration=4, heldout=0, mass=mass)
    assert all(e.pattern == Dense() for e in entries(select_heads(both)))
    one_domain = both[both["source"] == "prose"]
    chosen = {e.pattern.kind for e in entries(select_heads(one_domain))}
    assert chosen == {"a_shape"}
    mean = SelectionOptions(target_mass=0.84, statistic="mean")
    assert "dense" not in {e.pattern.kind for e in entries(select_heads(both, mean))}


def test_equal_candidates_go_to_the_simpler_kind():
    def mass(rng, length, sample, layer, head, candidate):
        return [0.99] * 5

    candidates = (Dense(), BlockSparse(blocks=9, tile=64), AShape(sink=64, window=449, tile=64))
    frame = scores_frame(candidates, mass=mass)
    cost = frame.groupby("kind")["tiles"].first()
    assert abs(cost["a_shape"] / cost["block_sparse"] - 1) < 0.02
    assert {e.pattern.kind for e in entries(select_heads(frame))} == {"a_shape"}


class NoisyDense:
    """Times in which the sparse kernel reads everything a little faster than dense is."""

    unit, measured, device, sha256 = "ms", True, "Test GPU", "ab" * 32

    def head_cost(self, candidates, num_tokens, tiles, columns):
        dense = np.array([c == Dense() for c in candidates])
        return np.where(dense, 1.005, tiles / tiles.max())

    def index_cost(self, candidates, num_tokens):
        return np.zeros(len(candidates))

    def launch_cost(self, candidates, num_tokens, tiles, columns):
        return 0.0

    def layer_backends(self, candidates, num_tokens, tiles, columns):
        return ("kernel",) * len(candidates)


@pytest.mark.parametrize(
    "options",
    [
        SelectionOptions(objective="mass", target_mass=None, budget_fraction=0.999),
        SelectionOptions(objective="mass", target_mass=None, budget_fraction=1.5, tp_size=3),
        SelectionOptions(target_mass=0.9, tp_size=3),
    ],
    ids=["mass", "mass on ranks", "slack of ranks"],
)
def test_what_reads_everything_is_called_dense(options):
    everything, some = AShape(sink=64, window=1024, tile=64), AShape(sink=64, window=64, tile=64)

    def mass(rng, length, sample, layer, head, candidate):
        return [0.95 if candidate == some and head else 1.0 if candidate != some else 0.3] * 5

    frame = scores_frame((Dense(), everything, some), lengths=(1024,), mass=mass)
    assert (frame[frame["window"] == 1024]["density"] == 1.0).all()
    chosen = {e.pattern for e in entries(select_heads(frame, options, NoisyDense()))}
    assert Dense() in chosen
    assert everything not in chosen


def test_random_masses_of_the_factory_are_masses():
    rng = np.random.default_rng(0)
    values = [random_mass(rng, 1024, 0, 0, 0, c) for c in SMALL_GRID for _ in range(20)]
    assert 0.0 <= np.min(values) <= np.max(values) <= 1.0
