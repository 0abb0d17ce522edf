"""The recipe document: what is accepted, what is refused and how that is said."""

import contextlib
import json
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from patternsearch.calibration.checking import check_recipe
from patternsearch.calibration.plan import plan_slots, resolve
from patternsearch.calibration.recipes import load_recipe
from patternsearch.data import data_path
from patternsearch.errors import EnvironmentLacks, PatternsearchError, RecipeError
from support.recipes import needle, recipe, recipe_document, stdlib, text_files

SHIPPED = sorted(path.stem for path in data_path("calib").glob("*.yaml"))


def hub(**fields):
    return {"kind": "hub", "name": "hub", "dataset": "owner/name"} | fields


def write(tmp_path, document, name="r.yaml"):
    path = tmp_path / name
    path.write_text(yaml.safe_dump(document) if name.endswith("yaml") else json.dumps(document))
    return path


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipe_loads_by_name_and_path(name):
    loaded = load_recipe(name)
    assert loaded.name == name
    assert loaded == load_recipe(data_path("calib") / f"{name}.yaml")


def test_shipped_recipes_are_the_three():
    assert SHIPPED == ["longcontext", "offline", "smoke"]


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_load_recipe_reads_yaml_and_json(tmp_path, suffix):
    document = recipe_document(needle(), stdlib(), text_files())
    assert load_recipe(write(tmp_path, document, f"r.{suffix}")) == recipe(*document["sources"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lenghts": []}, ["lenghts", "unknown key", "did you mean 'lengths'"]),
        ({"sources": [needle(depth=0.5)]}, ["sources[0].depth", "unknown key", "depths"]),
        ({"sources": [needle(task="poem")]}, ["sources[0].task", "poem", "needle"]),
        ({"sources": [{"kind": "web", "name": "a"}]}, ["sources[0]", "web"]),
        ({"sources": []}, ["sources", "at least 1"]),
        ({"sources": [needle(), needle()]}, ["source needle is given twice"]),
        ({"sources": [needle(weight=0)]}, ["weight", "greater than 0"]),
        ({"sources": [needle(name="../x")]}, ["name", "../x"]),
        ({"sources": [needle(depths=[1.5])]}, ["depths[0]", "1.5"]),
        ({"sources": [needle(heldout=False)]}, ["heldout_fraction", "no source allows held-out"]),
        ({"sources": [text_files(paths=["../secret.txt"])]}, ["../secret.txt", "absolute path"]),
        ({"sources": [text_files(paths=["a/../../b"])]}, ["leaves the recipe's folder"]),
        ({"sources": [stdlib(files=["../x.py"])]}, ["leaves the package"]),
        ({"sources": [stdlib(files=["/etc/passwd"])]}, ["leaves the package"]),
        ({"sources": [hub(dataset="../x")]}, ["sources[0].dataset", "../x"]),
        ({"sources": [hub(dataset="text")]}, ["sources[0].dataset", "text"]),
        ({"heldout_fraction": 0.9}, ["heldout_fraction", "0.9", "0.5"]),
        ({"heldout_fraction": "0.2"}, ["heldout_fraction", "number"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"seed": True}, ["seed", "true"]),
        ({"lengths": [{"tokens": 8, "samples": 1}]}, ["lengths[0].tokens", "8", "32"]),
        (
            {"lengths": [{"tokens": 64, "samples": n} for n in (1, 2)]},
            ["length 64 is given twice"],
        ),
        ({"lengths": [{"tokens": 64}]}, ["lengths[0]", "'samples' is missing"]),
        ({"format": "patternsearch/config"}, ["patternsearch/config", "patternsearch/recipe"]),
        ({"schema_version": 2}, ["schema_version 2 is newer", "upgrade"]),
        ({"chat_template": "on"}, ["chat_template", "on"]),
    ],
)
def test_load_recipe_names_the_fault(tmp_path, change, said):
    path = write(tmp_path, recipe_document() | change)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    message = str(caught.value)
    assert all(text in message for text in [str(path), *said]), message
    assert caught.value.exit_code == 2


def test_load_recipe_names_missing_file_and_unknown_name(tmp_path):
    with pytest.raises(RecipeError, match=r"gone\.yaml does not exist"):
        load_recipe(tmp_path / "gone.yaml")
    with pytest.raises(RecipeError, match=r"'gone' is neither a file nor a shipped recipe.*smoke"):
        load_recipe("gone")


@pytest.mark.parametrize("text", ["", "[]", "- a", "a: [", "a: &x [*x]", "\x00", "{", "null"])
def test_load_recipe_refuses_what_is_no_mapping(tmp_path, text):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError):
        load_recipe(path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_load_recipe_never_fails_otherwise(tmp_path_factory, data):
    document = recipe_document(needle(), stdlib(optional=True), text_files(field="x"))
    target = data.draw(st.sampled_from([document, *document["sources"], *document["lengths"]]))
    key = data.draw(st.sampled_from(sorted(target)) | st.text(max_size=9))
    target[key] = data.draw(JSON_VALUES)
    path = tmp_path_factory.mktemp("fuzz") / "r.json"
    path.write_text(json.dumps(document))
    with contextlib.suppress(PatternsearchError):
        check_recipe(path)


# --- the plan --------------------------------------------------------------------------------


def counts(resolved, split):
    slots = [slot for slot in plan_slots(resolved) if slot.split == split]
    return {s.name: sum(slot.source is s for slot in slots) for s in resolved.sources}


@pytest.mark.parametrize(
    ("weights", "num_samples", "expected"),
    [
        ((1, 1, 1), 3, (1, 1, 1)),
        ((2, 1, 1), 4, (2, 1, 1)),
        ((2, 1, 1), 5, (3, 1, 1)),
        ((5, 3, 2), 100, (50, 30, 20)),
        ((0.5, 0.3, 0.2), 10, (5, 3, 2)),
        ((1, 1, 1), 2, (1, 1, 0)),
    ],
)
def test_plan_slots_honours_weights(weights, num_samples, expected):
    sources = [needle(name=f"s{i}", weight=weight) for i, weight in enumerate(weights)]
    lengths = [{"tokens": 64, "samples": num_samples}]
    resolved = resolve(recipe(*sources, lengths=lengths, heldout_fraction=0.5))
    for split in ("calibration", "heldout"):
        assert tuple(counts(resolved, split).values()) == expected


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    num_samples=st.lists(st.integers(1, 12), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_plan_slots_shares_as_fairly_as_whole_samples_allow(weights, num_samples):
    sources = [needle(name=f"s{i}", weight=weight) for i, weight in enumerate(weights)]
    lengths = [{"tokens": 64 + i, "samples": n} for i, n in enumerate(num_samples)]
    resolved = resolve(recipe(*sources, lengths=lengths))
    given_samples = list(counts(resolved, "calibration").values())
    assert sum(given_samples) == sum(num_samples)
    # Webster's criterion: no sample would be better placed with another source.
    least = min(w / (2 * n - 1) for w, n in zip(weights, given_samples, strict=True) if n)
    most = max(w / (2 * n + 1) for w, n in zip(weights, given_samples, strict=True))
    assert least >= most * (1 - 1e-12)


def test_plan_slots_of_a_length_do_not_depend_on_longer_ones():
    sources = [needle(name=f"s{i}", weight=i + 1) for i in range(4)]
    both = plan_slots(resolve(recipe(*sources), lengths=[300, 500]))
    short = plan_slots(resolve(recipe(*sources), lengths=[300]))
    assert both[: len(short)] == short


def test_plan_slots_names_are_unique_and_readable():
    slots = plan_slots(resolve(recipe(needle(), stdlib())))
    assert [slot.sample_id for slot in slots] == [
        "l300-000-needle", "l300-001-stdlib", "l300-002-needle",
        "l500-000-needle", "l500-001-stdlib", "l500-002-stdlib",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fraction", "num_samples", "expected"),
    [(0, 5, 0), (0.01, 1, 1), (0.25, 3, 1), (0.3333, 4, 2), (0.5, 4, 4), (0.2, 16, 4)],
)
def test_resolve_holds_out_the_fraction_and_at_least_one(fraction, num_samples, expected):
    lengths = [{"tokens": 64, "samples": num_samples}]
    [found] = resolve(recipe(heldout_fraction=fraction, lengths=lengths)).lengths
    assert (found.calibration, found.heldout) == (num_samples, expected)


def test_resolve_applies_arguments():
    resolved = resolve(recipe(), lengths=[1000, 300, 300], samples=None, seed=3)
    assert [(c.tokens, c.calibration) for c in resolved.lengths] == [(300, 2), (1000, 2)]
    assert resolved.seed == 3
    assert resolve(recipe(), samples=9).lengths[1].calibration == 9


@pytest.mark.parametrize(
    "arguments", [{"lengths": []}, {"lengths": [3]}, {"samples": 0}, {"seed": -1}]
)
def test_resolve_refuses_arguments_out_of_range(arguments):
    with pytest.raises(RecipeError):
        resolve(recipe(), **arguments)


def test_resolve_skips_an_optional_package_and_says_so():
    absent = stdlib(name="absent", package="no_such_package_here", optional=True)
    resolved = resolve(recipe(needle(), absent))
    assert [source.name for source in resolved.sources] == ["needle"]
    [skipped] = resolved.skipped
    assert (skipped.name, skipped.reason) == (
        "absent",
        "package no_such_package_here is not installed",
    )
    assert resolved.sha256 != resolve(recipe(needle())).sha256


def test_resolve_needs_a_package_that_is_not_optional():
    with pytest.raises(EnvironmentLacks, match="no_such_package_here is not installed") as caught:
        resolve(recipe(stdlib(package="no_such_package_here")))
    assert caught.value.exit_code == 3


def test_resolve_needs_one_source():
    absent = stdlib(name="absent", package="no_such_package_here", optional=True)
    with pytest.raises(RecipeError, match="none of its sources is there"):
        resolve(recipe(absent))


def test_digest_changes_with_content_only():
    digest = resolve(recipe()).sha256
    assert digest == resolve(recipe(description="another word")).sha256
    assert digest == resolve(recipe(), lengths=[300, 500], seed=7).sha256
    assert digest != resolve(recipe(), seed=8).sha256
    assert digest != resolve(recipe(needle(weight=2))).sha256


def test_loading_a_recipe_imports_neither_datasets_nor_torch():
    code = (
        "from patternsearch.calibration.checking import check_recipe; check_recipe('smoke');"
        "import sys; print([m for m in ('torch', 'datasets', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
