"""The config document: canonical text, strict loading, digests, migrations, JSON Schema."""

import json
import re
from pathlib import Path

import pytest
import yaml

from patternsearch.errors import ConfigError, InputError, RecipeError
from patternsearch.patterns.grids import Grid
from patternsearch.schema import io
from patternsearch.schema.config import PatternConfig
from patternsearch.schema.json_schema import config_json_schema_text
from patternsearch.schema.migrations import migrate
from support.configs import MINFERENCE_PATTERNS, PATTERNS, make_config, make_document

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "config"


@pytest.fixture
def config():
    return make_config(
        3, 4, 2, patterns=PATTERNS + MINFERENCE_PATTERNS, layer_types=["full", "sliding", "full"]
    )


@pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
def test_dump_then_load_is_the_identity(config, tmp_path, suffix):
    path = tmp_path / f"c.{suffix}"
    io.dump_config(config, path)
    assert io.load_config(path) == config
    form = "json" if suffix == "json" else "yaml"
    assert path.read_text() == io.dumps_config(io.load_config(path), form)
    assert path.read_bytes().endswith(b"\n")
    assert b"\r" not in path.read_bytes()


def test_every_head_is_one_line_of_json_in_yaml(config):
    text = io.dumps_config(config)
    lines = re.findall(r"^    - (\{.*\})$", text[text.index("\nheads:") :], re.MULTILINE)
    assert len(lines) == 8
    assert [json.loads(line)["pattern"] for line in lines] == [
        head.pattern.model_dump() for layer in config.heads if layer for head in layer
    ]


def test_a_plain_yaml_reader_reads_the_same_values(config, tmp_path):
    document = make_document(1, 2, 1)
    document["model"]["attention_scale"] = 1e-05
    document["heads"][0][0]["lengths"][0]["mass_std"] = 1e-17
    document["model"]["reference"] = "yes"
    small = PatternConfig.model_validate(document)
    for some in (config, small):
        stranger = yaml.safe_load(io.dumps_config(some))
        assert json.dumps(stranger) == json.dumps(json.loads(io.dumps_config(some, "json")))
    assert "1.0e-05" in io.dumps_config(small)
    assert '"mass_std": 1.0e-17' in io.dumps_config(small)


@pytest.mark.parametrize(
    "text", ["word\n", "", " x", "x ", "a: b", "- a", "#x", "yes", "1e5", "0x10", "\x85", "\u2028é"]
)
def test_awkward_strings_survive(text, tmp_path):
    document = make_document(1, 1, 1)
    document["model"]["reference"] = text
    document["model"]["rope"]["full"]["parameters"] = {text: text}
    config = PatternConfig.model_validate(document)
    for suffix in ("yaml", "json"):
        io.dump_config(config, tmp_path / f"c.{suffix}")
        assert io.load_config(tmp_path / f"c.{suffix}") == config


def test_layout_and_key_order_do_not_matter(config, tmp_path):
    text = io.dumps_config(config)
    document = yaml.safe_load(text)
    shuffled = dict(reversed(document.items()))
    shuffled["heads"] = [
        heads and [dict(reversed(head.items())) for head in heads] for heads in document["heads"]
    ]
    path = tmp_path / "shuffled.yaml"
    path.write_text(yaml.safe_dump(shuffled, sort_keys=False, default_flow_style=False))
    loaded = io.load_config(path)
    assert io.dumps_config(loaded) == text
    assert io.config_digest(loaded) == io.config_digest(config)


def test_digest_leaves_out_provenance_and_reference_only(config):
    def changed(**changes):
        return io.config_digest(config.model_copy(update=changes))

    digest = io.config_digest(config)
    provenance = config.provenance.model_copy(update={"torch": "9.9"})
    model = config.model
    assert changed(provenance=provenance) == digest
    assert changed(model=model.model_copy(update={"reference": "elsewhere"})) == digest
    assert changed(model=model.model_copy(update={"dtype": "bfloat16"})) != digest
    assert changed(heads=config.heads[::-1]) != digest


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("heads", 0, 1, "lengths", 0, "density"), "0.5", r'density: got "0.5": .*number'),
        (("heads", 0, 1, "lengths", 0, "density"), 1.5, r"got 1.5: .*less than or equal to 1"),
        (("heads", 0, 1, "lengths", 0, "length"), True, r"got true: .*integer"),
        (("heads", 0, 0, "pattern", "kind"), "stream_llm", r"pattern.*stream_llm"),
        (("heads", 0, 0, "patern"), {}, r"heads\[0\]\[0\].patern: .*did you mean 'pattern'"),
        (("model", "num_layers"), 3, r"layer_types has 2 entries for 3 layers"),
        (("model", "num_kv_heads"), 3, r"4 query heads are not divisible by 3"),
        (("heads",), [], r"heads has 0 layers, the model 2"),
        (("heads", 1), None, r"layer 1 is full attention but its heads are null"),
        (("calibration",), None, r"exactly one of calibration and imported"),
        (("fingerprints", "values"), [[]], r"fingerprints has 1 layers"),
        (("tensor_parallel", "size"), 2, r"the 2 ranks of the layout"),
        (("schema_version",), 2, r"schema_version 2 is newer than 1.*upgrade"),
        (("schema_version",), "1", r"schema_version is '1'"),
        (("schema_version",), 0, r"schema_version is 0"),
        (("format",), "patternsearch/recipe", r"format 'patternsearch/recipe'"),
    ],
)  # fmt: skip
def test_faults_are_told_by_path_value_and_rule(tmp_path, path, value, words):
    document = make_document()
    parent = document
    for part in path[:-1]:
        parent = parent[part]
    parent[path[-1]] = value
    for suffix, text in (
        ("json", json.dumps(document)),
        ("yaml", yaml.safe_dump(document, sort_keys=False)),
    ):
        file = tmp_path / f"c.{suffix}"
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            io.load_config(file)


def test_a_fault_in_a_head_is_told_with_its_line(config, tmp_path):
    lines = io.dumps_config(config).splitlines()
    number = next(i for i, line in enumerate(lines) if line.startswith('    - {"pattern"')) + 2
    lines[number] = re.sub(r'"density": [0-9.]+', '"density": 2.0', lines[number], count=1)
    path = tmp_path / "c.yaml"
    path.write_text("\n".join(lines))
    words = rf"c.yaml:{number + 1}: heads\[0\]\[2\].lengths\[0\].density: got 2.0"
    with pytest.raises(ConfigError, match=words):
        io.load_config(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "use `patternsearch import`"),
        ("hello", "holds no mapping"),
        ("a: 1", "has no `format: patternsearch/config`"),
        ("", "holds no mapping"),
    ],
)
def test_foreign_files_are_recognised(tmp_path, text, words):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        io.load_config(path)


def test_a_missing_key_and_many_faults_are_listed(tmp_path):
    document = make_document(2, 8, 2)
    for heads in document["heads"]:
        for head in heads:
            del head["pattern"]
    path = tmp_path / "c.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"and 11 more faults") as caught:
        io.load_config(path)
    assert "heads[0][0]: key 'pattern' is missing" in str(caught.value)


def test_dump_never_replaces_a_foreign_file_unasked(config, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("my: notes\n")
    with pytest.raises(InputError, match="--force"):
        io.dump_config(config, path)
    assert path.read_text() == "my: notes\n"
    io.dump_config(config, path, force=True)
    io.dump_config(config, path)
    with pytest.raises(InputError, match=r"ends in \.yaml"):
        io.dump_config(config, tmp_path / "c.txt")


def test_numbers_that_are_not_finite_are_never_written(config, tmp_path):
    document = make_document()
    document["model"]["rope"]["full"]["parameters"]["factor"] = float("nan")
    broken = PatternConfig.model_validate(document)
    with pytest.raises(InputError, match="not finite"):
        io.dump_config(broken, tmp_path / "c.yaml")
    assert not (tmp_path / "c.yaml").exists()


@pytest.mark.parametrize("old", sorted(GOLDEN.glob("v*.yaml")), ids=lambda p: p.stem)
def test_golden_files_migrate_to_the_committed_result(old):
    expected = old.with_suffix(".expected.yaml")
    expected = expected if expected.exists() else old
    assert io.dumps_config(io.load_config(old)) == expected.read_text()


def test_migrations_are_chained_one_step_each():
    steps = {
        1: lambda d: d | {"b": d["a"] + 1},
        2: lambda d: {k: v for k, v in d.items() if k != "a"} | {"c": 3},
    }
    old = {"schema_version": 1, "a": 1}
    assert migrate(old, name="x", target=3, steps=steps) == {"schema_version": 3, "b": 2, "c": 3}
    assert old == {"schema_version": 1, "a": 1}
    current = {"schema_version": 3}
    assert migrate(current, name="x", target=3, steps=steps) is current


def test_committed_json_schema_is_current():
    committed = (ROOT / "configs" / "schema" / "config.schema.json").read_text()
    assert committed == config_json_schema_text(), "run `make schema`"


@pytest.mark.parametrize("name", ["default", "minference", "smoke"])
def test_shipped_grids_load_by_name_and_path(name):
    grid, digest = io.load_grid(name)
    assert grid.name == name
    path = ROOT / "configs" / "grids" / f"{name}.yaml"
    assert io.load_grid(path) == (grid, digest)


def test_grid_faults(tmp_path):
    with pytest.raises(ConfigError, match=r"no grid 'nothing'.*default, .*minference, smoke"):
        io.load_grid("nothing")
    text = (ROOT / "configs" / "grids" / "smoke.yaml").read_text()
    path = tmp_path / "g.yaml"
    path.write_text(text.replace("min_tokens", "min_token"))
    with pytest.raises(ConfigError, match=r"g.yaml:5: min_token: .*did you mean 'min_tokens'"):
        io.load_grid(path)
    path.write_text(text.replace("schema_version: 1", "schema_version: 7"))
    with pytest.raises(RecipeError, match="schema_version 7 is newer"):
        io.load_model_file(path, Grid, error=RecipeError)
    path.write_text(text.replace("patternsearch/grid", "patternsearch/recipe"))
    with pytest.raises(ConfigError, match="expected 'patternsearch/grid'"):
        io.load_grid(path)
    path.write_text(text.replace("[64, 256]", "[64, '256']"))
    with pytest.raises(ConfigError, match=r"window\[1\]: got \"256\""):
        io.load_grid(path)


def test_comments_do_not_change_a_grid_digest(tmp_path):
    text = (ROOT / "configs" / "grids" / "smoke.yaml").read_text()
    path = tmp_path / "g.yaml"
    path.write_text("# more words\n" + text)
    assert io.load_grid(path)[1] == io.load_grid("smoke")[1]
