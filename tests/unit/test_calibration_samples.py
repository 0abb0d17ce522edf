"""Samples: exact lengths, reproducible everywhere, held-out ones apart, dry sources named."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from patternsearch.calibration.plan import plan_slots, resolve
from patternsearch.calibration.recipes import load_recipe
from patternsearch.calibration.samples import draw_samples, draw_slots
from patternsearch.data import data_path
from patternsearch.errors import RecipeError
from support.recipes import (
    bos_tokenizer,
    needle,
    paragraphs,
    recipe,
    stdlib,
    text_files,
    tiny_tokenizer,
)


@pytest.fixture
def folder(tmp_path):
    for i in range(12):
        (tmp_path / f"{i:02d}.txt").write_text(paragraphs(i))
    return tmp_path


def draw(*sources, folder, tokenizer=None, **changes):
    return draw_samples(recipe(*sources, **changes), tokenizer or tiny_tokenizer(), base_dir=folder)


def digests(samples):
    return {sample.sample_id: sample.sha256 for sample in samples}


@pytest.mark.parametrize("chat_template", [False, True])
@pytest.mark.parametrize("source", [text_files(), stdlib(), needle()], ids=lambda s: s["name"])
def test_draw_samples_has_exact_lengths_of_real_tokens(folder, source, chat_template):
    samples = draw(source, folder=folder, chat_template=chat_template)
    assert [(s.length, s.split) for s in samples] == [
        (300, "calibration"), (300, "calibration"), (300, "heldout"),
        (500, "calibration"), (500, "calibration"), (500, "heldout"),
    ]  # fmt: skip
    for sample in samples:
        assert sample.num_tokens == sample.length == sample.token_ids.size
        assert sample.token_ids.dtype == np.int32
        assert not sample.token_ids.flags.writeable
        assert tiny_tokenizer().pad_token_id not in sample.token_ids
        assert sample.sha256 == hashlib.sha256(sample.token_ids.astype("<i4").tobytes()).hexdigest()
    assert len(set(digests(samples).values())) == len(samples)


def test_draw_samples_records_document_boundaries(folder):
    texts = {f"{i:02d}.txt": paragraphs(i) + "\n\n" for i in range(12)}
    tokenizer = tiny_tokenizer()
    samples = draw(
        text_files(), folder=folder, lengths=[{"tokens": 1500, "samples": 2}], heldout_fraction=0
    )
    for sample in samples:
        assert len(sample.documents) > 1
        offsets = [span.offset for span in sample.documents] + [sample.num_tokens]
        assert offsets[0] == 0
        for span, end in zip(sample.documents, offsets[1:], strict=True):
            whole = tokenizer(texts[span.document], add_special_tokens=False)["input_ids"]
            part = sample.token_ids[span.offset : end].tolist()
            assert part == whole[span.start : span.start + len(part)]


def test_draw_samples_never_shares_documents_between_the_splits(folder):
    samples = draw(
        text_files(), stdlib(), needle(), folder=folder,
        lengths=[{"tokens": n, "samples": 6} for n in (200, 300, 400)],
    )  # fmt: skip
    used = {
        split: {(d.source, d.document) for s in samples if s.split == split for d in s.documents}
        for split in ("calibration", "heldout")
    }
    assert used["calibration"]
    assert used["heldout"]
    assert not used["calibration"] & used["heldout"]


def test_every_length_has_a_heldout_sample(folder):
    samples = draw(
        needle(), folder=folder, heldout_fraction=0.01,
        lengths=[{"tokens": n, "samples": 1} for n in (250, 300, 350)],
    )  # fmt: skip
    assert [s.length for s in samples if s.split == "heldout"] == [250, 300, 350]


def test_sources_can_be_kept_out_of_the_heldout_split(folder):
    samples = draw(text_files(heldout=False), needle(), folder=folder)
    assert {s.source for s in samples if s.split == "heldout"} == {"needle"}
    assert {s.source for s in samples if s.split == "calibration"} == {"needle", "notes"}


def test_draw_samples_is_the_same_in_another_process(folder):
    names = (text_files(), stdlib(), needle())
    here = digests(draw(*names, folder=folder))
    code = f"""
import json
from pathlib import Path
from support.recipes import recipe, tiny_tokenizer
from patternsearch.calibration.samples import draw_samples
samples = draw_samples(recipe(*{names!r}), tiny_tokenizer(), base_dir=Path({str(folder)!r}))
print(json.dumps({{s.sample_id: s.sha256 for s in samples}}))
"""
    env = os.environ | {"PYTHONPATH": "tests", "PYTHONHASHSEED": "123", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    assert json.loads(run.stdout.splitlines()[-1]) == here


@pytest.mark.parametrize("source", [text_files(), stdlib(), needle()], ids=lambda s: s["name"])
def test_a_sample_depends_on_its_own_source_and_place_only(folder, source):
    alone = draw(source, folder=folder)
    others = [needle(name="a"), stdlib(name="b"), text_files(name="c")]
    mixed = draw(source, *others, folder=folder, lengths=[
        {"tokens": 500, "samples": 8}, {"tokens": 300, "samples": 8}, {"tokens": 400, "samples": 4},
    ])  # fmt: skip

    def series(samples):
        found = {}
        for sample in samples:
            if sample.source == source["name"]:
                found.setdefault((sample.length, sample.split), []).append(sample.sha256)
        return found

    one, many = series(alone), series(mixed)
    for key in one:
        common = min(len(one[key]), len(many.get(key, [])))
        assert one[key][:common] == many.get(key, [])[:common]
    assert any(many.get(key) for key in one)


def test_draw_slots_of_a_share_gives_the_samples_of_the_whole(folder):
    resolved = resolve(recipe(text_files(), stdlib(), needle()))
    slots = plan_slots(resolved)
    whole = digests(draw_slots(resolved, slots, tiny_tokenizer(), base_dir=folder))
    shares = [
        digests(draw_slots(resolved, slots[rank::3], tiny_tokenizer(), base_dir=folder))
        for rank in range(3)
    ]
    assert shares[0] | shares[1] | shares[2] == whole


def test_another_seed_gives_other_samples(folder):
    sources = stdlib(files=["*.py"], min_chars=2000), needle()
    one = digests(draw(*sources, folder=folder))
    two = digests(draw(*sources, folder=folder, seed=8))
    assert not set(one.values()) & set(two.values())


def test_prompts_begin_with_the_tokenizers_prefix(folder):
    bos = bos_tokenizer().bos_token_id
    for sample in draw(text_files(), needle(), folder=folder, tokenizer=bos_tokenizer()):
        assert sample.token_ids[0] == bos
        assert bos not in sample.token_ids[1:]
        assert sample.documents[0].offset == 1


def test_chat_template_frames_plain_texts(folder):
    [first, *_] = draw(text_files(), folder=folder, chat_template=True)
    text = tiny_tokenizer().decode(first.token_ids)
    assert text.startswith("<|im_start|>user\nLine 0 of text")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_chat_template_is_needed_when_asked_for(folder):
    with pytest.raises(RecipeError, match="tokenizer has no chat template"):
        draw(needle(), folder=folder, tokenizer=bos_tokenizer(), chat_template=True)


def test_chat_template_that_refuses_is_named(folder, monkeypatch):
    import copy

    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(RecipeError, match=r"refuses a conversation with the roles user.*no users"):
        draw(needle(), folder=folder, tokenizer=tokenizer, chat_template=True)


def test_conversations_are_packed_as_they_are(tmp_path):
    rows = [
        {
            "m": [
                {"role": "user", "content": paragraphs(i)},
                {"role": "assistant", "content": "Yes."},
            ]
        }
        for i in range(9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = text_files(name="chat", paths=["rows.jsonl"], field="m") | {"format": "json"}
    [first, *_] = draw(source, folder=tmp_path, chat_template=True)
    assert tiny_tokenizer().decode(first.token_ids).startswith("<|im_start|>user\nLine 0 of text")


def test_a_dry_source_is_named_with_what_it_had(folder):
    tokens = sum(
        len(tiny_tokenizer()(paragraphs(i) + "\n\n")["input_ids"]) for i in range(12) if i % 4
    )
    with pytest.raises(RecipeError) as caught:
        draw(text_files(), folder=folder, lengths=[{"tokens": 5000, "samples": 3}])
    assert str(caught.value) == (
        f"source notes ran dry: calibration sample {tokens // 5000 + 1} of length 5000 needs 5000 "
        f"tokens and lacks {5000 - tokens % 5000} of them; the source had {tokens} tokens in 9 "
        "documents in the calibration share of its documents: give it more text, or take fewer "
        "samples or shorter lengths"
    )


@pytest.mark.parametrize("content", ["", " \n\n "])
def test_an_empty_source_is_dry(tmp_path, content):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(RecipeError, match=r"source notes ran dry.*0 tokens in 0 documents"):
        draw(text_files(), folder=tmp_path, heldout_fraction=0)


def test_a_tokenizer_that_returns_nothing_makes_the_source_dry(folder):
    class Silent:
        chat_template = None

        def __call__(self, text, **options):
            return {"input_ids": [] if isinstance(text, str) else [[] for _ in text]}

    with pytest.raises(RecipeError, match=r"source notes ran dry.*0 tokens in 9 documents"):
        draw(text_files(), folder=folder, tokenizer=Silent())


def test_a_source_of_one_document_cannot_be_held_out(tmp_path):
    (tmp_path / "a.txt").write_text(paragraphs(0, 200))
    with pytest.raises(RecipeError, match="0 tokens in 0 documents in the calibration share"):
        draw(text_files(), folder=tmp_path)
    assert draw(text_files(heldout=False), needle(), folder=tmp_path)


def test_mixed_rows_are_refused(tmp_path):
    from patternsearch.calibration import samples as module
    from patternsearch.calibration.packing import Document

    mixed = [Document("a", "x" * 9), Document("b", "y" * 9, is_conversation=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "iter_documents", lambda *a, **k: iter(mixed))
        with pytest.raises(RecipeError, match="b mixes texts and lists of messages"):
            draw(text_files(), folder=tmp_path, heldout_fraction=0)


def test_progress_is_told_every_sample(folder):
    class Recorder:
        def __init__(self):
            self.calls = []

        def start(self, task, total, unit):
            self.calls.append(("start", task, total, unit))

        def advance(self, task, amount, note=""):
            self.calls.append((task, amount, note))

        def finish(self, task):
            self.calls.append(("finish", task))

    recorder = Recorder()
    samples = draw_samples(
        recipe(needle()), tiny_tokenizer(), base_dir=folder, progress=recorder, lengths=[300]
    )
    assert recorder.calls == [
        ("start", "samples", 900.0, "tokens"),
        *[("samples", 300.0, s.sample_id) for s in samples],
        ("finish", "samples"),
    ]


@pytest.mark.parametrize("name", ["smoke", "offline"])
def test_shipped_recipe_draws_with_a_byte_level_tokenizer(name):
    found = load_recipe(name)
    samples = draw_samples(found, tiny_tokenizer(), base_dir=data_path("calib"))
    assert {s.length for s in samples} == {plan.tokens for plan in found.lengths}
    assert {s.source for s in samples} >= {"needle", "stdlib-code"}
    if name == "offline":
        assert {"multikey", "dialogue", "python-topics"} <= {s.source for s in samples}
        assert len(samples) == 9
