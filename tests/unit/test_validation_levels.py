"""A model's own config passes every level; each planted fault is named where it shows."""

import pytest
import torch

from patternsearch.errors import InputError, ModelError
from patternsearch.model.loading import load_model
from patternsearch.schema.io import load_config
from patternsearch.selection.options import SelectionOptions
from patternsearch.validation.api import ValidationRequest, validate
from patternsearch.validation.quality import measure_quality
from patternsearch.validation.samples import judging_samples
from support.calibrated import run_tiny
from support.faults import (
    copy_model,
    edit_config,
    edit_json,
    edit_tensors,
    flip_one_bit,
    permute_query_heads,
    swap_entries,
    truncate,
)
from support.tiny_models import tiny_model_dir

TARGET = 0.6
"""Random weights attend everywhere: a low target leaves sparse heads of several kinds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("validation")


@pytest.fixture(scope="module")
def model(folder):
    return tiny_model_dir(folder, num_attention_heads=8, num_key_value_heads=2)


@pytest.fixture(scope="module")
def config(folder, model):
    path = folder / "c.yaml"
    options = SelectionOptions(target_mass=TARGET)
    run_tiny(model, path, lengths=(256, 512), samples=1, options=options)
    return path


def run(config, model, level="identity", **changes):
    return validate(ValidationRequest(config=config, model=model, level=level, **changes))


def faults(report):
    return {check.name: check for check in report.checks if check.status == "differs"}


def test_own_config_passes_up_to_quality(config, model):
    report = run(config, model, "quality")
    assert not faults(report), faults(report)
    assert (report.status, report.exit_code) == ("ok", 0)
    assert report.mapping.verdict == "same weights"
    quality = report.quality
    assert len(quality.heads) == 2 * 3 * 8
    assert all(abs(h.mass - h.recorded_mass) < 1e-5 for h in quality.heads)
    blocks = [h for h in quality.heads if h.pattern.startswith("block_sparse")]
    assert all(h.oracle_mass >= h.mass - 1e-6 for h in blocks)
    assert sum(h.index_gap for h in quality.heads) > 0
    assert all(h.error_over_bound <= 1 for h in quality.heads)
    dense = [h for h in quality.heads if h.pattern == "dense"]
    assert all(h.relative_error < 1e-4 for h in dense)
    sparse = [h for h in quality.heads if h.pattern != "dense"]
    assert sparse, "the fixture must exercise sparse heads"
    assert max(h.relative_error for h in sparse) > 1e-3


def test_levels_include_the_ones_before(config, model):
    groups = [
        {check.group for check in run(config, model, level).checks}
        for level in ("identity", "mapping")
    ]
    assert groups == [{"identity", "tensor parallel"}, {"identity", "tensor parallel", "mapping"}]


def test_another_dtype_of_the_run_is_no_fault(config, model):
    report = run(config, model, "mapping", dtype="bfloat16")
    assert not faults(report)


def test_no_weights_is_said(config, model):
    notes = []
    report = validate(
        ValidationRequest(config=config, model=model, level="mapping", weights=False),
        note=notes.append,
    )
    assert any("--no-weights" in note for note in notes)
    statuses = {c.name: c.status for c in report.checks}
    assert statuses["weights"] == "cannot tell"
    assert report.mapping.verdict == "same weights"


# --- faults in the checkpoint --------------------------------------------------------------


def test_one_flipped_bit_names_its_layer(config, model, tmp_path):
    changed = copy_model(model, tmp_path / "m")
    flip_one_bit(changed, "model.layers.1.self_attn.k_proj.weight")
    found = faults(run(config, changed, "mapping"))
    assert set(found) == {"weights", "attention weights"}
    assert found["attention weights"].found == "changed in layers 1"


def test_a_changed_mlp_leaves_attention_alone(config, model, tmp_path):
    changed = copy_model(model, tmp_path / "m")
    flip_one_bit(changed, "model.layers.1.mlp.up_proj.weight")
    assert set(faults(run(config, changed))) == {"weights"}


def test_permuted_query_heads_are_named_by_both_levels(config, model, tmp_path):
    changed = copy_model(model, tmp_path / "m")
    order = [0, 3, 2, 1, 4, 5, 6, 7]  # heads 1 and 3, of one kv group
    permute_query_heads(changed, "model.layers.0.self_attn.q_proj.weight", order, 16)
    found = faults(run(config, changed, "mapping"))
    assert found["attention weights"].found == "changed in layers 0"
    assert "layer 0: heads 1 and 3 are swapped" in found["swapped heads"].found


def test_scaled_rope_theta_is_named(config, model, tmp_path):
    changed = copy_model(model, tmp_path / "m")

    def scale(document):
        document["rope_parameters"]["rope_theta"] *= 4

    edit_json(changed / "config.json", scale)
    found = faults(run(config, changed))
    assert set(found) == {"RoPE: rope_theta", "RoPE: inverse frequencies"}


def test_another_tokenizer_is_named(config, model, tmp_path):
    changed = copy_model(model, tmp_path / "m")

    def swap(document):
        vocabulary = document["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    edit_json(changed / "tokenizer.json", swap)
    assert set(faults(run(config, changed))) == {"tokenizer"}


def test_truncated_shard_is_named(config, model, tmp_path):
    changed = copy_model(model, tmp_path / "m")
    truncate(changed / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors.*truncated"):
        run(config, changed)


def test_resharding_changes_nothing(config, tmp_path):
    sharded = tiny_model_dir(
        tmp_path, num_attention_heads=8, num_key_value_heads=2, max_shard_size="50KB"
    )
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert not faults(run(config, sharded))


def test_a_small_fine_tune_plausibly_holds(config, model, tmp_path):
    changed = copy_model(model, tmp_path / "m")
    generator = torch.Generator().manual_seed(0)

    def noise(tensors):
        for name, tensor in tensors.items():
            if "self_attn" in name:
                step = torch.randn(tensor.shape, generator=generator) * tensor.std()
                tensors[name] = tensor + 0.02 * step

    edit_tensors(changed, noise)
    report = run(config, changed, "mapping")
    assert set(faults(report)) == {"weights", "attention weights"}
    assert report.mapping.verdict == "fine-tuned, patterns plausibly hold"


def test_other_weights_are_a_different_model(config, tmp_path):
    other = tiny_model_dir(tmp_path, seed=1, num_attention_heads=8, num_key_value_heads=2)
    report = run(config, other, "mapping")
    assert report.mapping.verdict == "different model"
    assert "weights by their heads" in faults(report)


def test_another_shape_stops_after_identity(config, tmp_path):
    other = tiny_model_dir(tmp_path, num_hidden_layers=2)
    report = run(config, other, "quality")
    assert {"layers", "query heads"} <= set(faults(report))
    assert report.quality is None
    assert "another shape" in report.notes[0]


# --- faults in the config ------------------------------------------------------------------


def two_heads_apart(config):
    """Return (layer, a, b) whose patterns and records differ clearly."""
    for layer, entries in enumerate(load_config(config).heads):
        for a, one in enumerate(entries):
            for b, other in enumerate(entries[:a]):
                gap = abs(one.lengths[-1].heldout_mean - other.lengths[-1].heldout_mean)
                if one.pattern != other.pattern and gap > 0.03:
                    return layer, b, a
    raise AssertionError("no two heads differ enough")


def test_swapped_entries_are_named_by_quality(config, model, folder):
    layer, a, b = two_heads_apart(config)
    swapped = edit_config(config, folder / "c.swapped.yaml", swap_entries(layer, a, b))
    assert not faults(run(swapped, model, "mapping"))
    found = faults(run(swapped, model, "quality"))["captured mass against the record"]
    assert f"layer {layer}: the entries of heads {a} and {b} are swapped" in found.advice


def test_swapped_fingerprints_are_named_by_mapping(config, model, folder):
    def swap(document):
        heads = document["fingerprints"]["values"][1]
        heads[2], heads[5] = heads[5], heads[2]

    path = edit_config(config, folder / "c.prints.yaml", swap)
    found = faults(run(path, model, "mapping"))
    assert found["swapped heads"].found == "layer 1: heads 2 and 5 are swapped"


def test_a_starved_head_is_listed_with_its_remedy(config, model, folder):
    def starve(document):
        pattern = {"kind": "a_shape", "sink": 1, "window": 1, "tile": 64}
        document["heads"][0][0]["pattern"] = pattern

    path = edit_config(config, folder / "c.starved.yaml", starve)
    report = run(path, model, "quality", lengths=(512,))
    assert {"captured mass against the record", "target mass in the worst region"} <= set(
        faults(report)
    )
    worst = report.quality.worst_heads(1)[0]
    assert (worst.layer, worst.head) == (0, 0)
    remedy = next(r for r in report.quality.remedies if (r.layer, r.head) == (0, 0))
    assert remedy.mended_worst_region >= TARGET
    assert remedy.mended != remedy.pattern


def test_config_without_fingerprints_cannot_be_mapped(config, model, folder):
    path = edit_config(
        config, folder / "c.noprints.yaml", lambda document: document.update(fingerprints=None)
    )
    report = run(path, model, "mapping")
    (check,) = report.of_group("mapping")
    assert check.status == "cannot tell"


# --- samples -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(model):
    return load_model(model)


def test_stored_and_redrawn_samples_are_the_same(config, loaded):
    document = load_config(config)
    stored = judging_samples(document, loaded, config_path=config)
    redrawn = judging_samples(document, loaded)
    assert stored.origin != redrawn.origin
    assert [s.sha256 for s in stored.samples] == [s.sha256 for s in redrawn.samples]
    assert {s.split for s in stored.samples} == {"heldout"}
    assert stored.complete_lengths == redrawn.complete_lengths == {256, 512}


def test_lengths_and_counts_limit_the_samples(config, loaded):
    judging = judging_samples(load_config(config), loaded, lengths=(256,), max_samples=1)
    assert [s.length for s in judging.samples] == [256]


def test_another_recipe_has_no_record_to_equal(config, loaded):
    judging = judging_samples(load_config(config), loaded, recipe="smoke", lengths=(256,))
    assert judging.complete_lengths == frozenset()


def test_uncalibrated_length_is_refused(config, loaded):
    with pytest.raises(InputError, match="1024 was not calibrated"):
        judging_samples(load_config(config), loaded, lengths=(1024,))


def test_changed_text_behind_the_recipe_is_refused(config, loaded, folder):
    def other(document):
        for sample in document["calibration"]["samples"]:
            sample["sha256"] = "0" * 64

    path = edit_config(config, folder / "c.othertext.yaml", other)
    with pytest.raises(InputError, match="now gives other tokens"):
        judging_samples(load_config(path), loaded)


def test_quality_does_not_depend_on_where_samples_come_from(config, loaded):
    document = load_config(config)
    limits = {"lengths": (256,), "max_samples": 1}
    reports = [
        measure_quality(
            loaded, document, judging_samples(document, loaded, config_path=p, **limits)
        )
        for p in (config, None)
    ]
    assert reports[0].heads == reports[1].heads
    assert reports[0].layers == reports[1].layers
