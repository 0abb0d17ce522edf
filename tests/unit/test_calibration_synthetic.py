"""Synthetic tasks: exact length, evidence at its depth, question last, and real variety."""

import ast
import contextlib
import io
import json
import re
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patternsearch.calibration.samples import draw_samples
from patternsearch.calibration.synthetic import build_task, spread_depth
from patternsearch.calibration.synthetic.draft import place
from patternsearch.calibration.tokens import Encoder
from patternsearch.errors import RecipeError
from support.recipes import bos_tokenizer, needle, recipe, tiny_tokenizer

TASKS = ["needle", "multikey", "variable_tracking", "dialogue", "code"]
PLAIN = Encoder(tiny_tokenizer(), chat_template=False)
CHAT = Encoder(tiny_tokenizer(), chat_template=True)


def build(task, *, encoder=PLAIN, length=6000, depth=0.5, key=("k",)):
    return build_task(task, encoder, length=length, depth=depth, key=key)


def text_of(prompt):
    return tiny_tokenizer().decode(prompt.token_ids)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [800, 801, 1337, 6000])
@pytest.mark.parametrize("encoder", [PLAIN, CHAT], ids=["plain", "chat"])
def test_build_task_has_the_exact_length(task, length, encoder):
    prompt = build(task, length=length, encoder=encoder)
    assert prompt.token_ids.shape == (length,)
    assert prompt.token_ids.dtype == np.int32


@settings(max_examples=40, deadline=None)
@given(
    task=st.sampled_from(TASKS),
    length=st.integers(700, 2500),
    depth=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_build_task_keeps_evidence_and_question_whole(task, length, depth, seed):
    prompt = build(task, length=length, depth=depth, key=(seed,))
    text = text_of(prompt)
    assert prompt.token_ids.size == length
    assert prompt.question in text[-len(prompt.question + prompt.lead) - 20 :]
    assert text.endswith(prompt.lead)
    assert len(prompt.evidence) == (4 if task == "variable_tracking" else 1)
    assert all(0 <= a < b for a, b in zip(prompt.evidence, prompt.evidence[1:], strict=False))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("encoder", [PLAIN, CHAT], ids=["plain", "chat"])
def test_build_task_places_the_evidence_at_its_depth(task, depth, encoder):
    prompt = build(task, length=12_000, depth=depth, encoder=encoder)
    assert prompt.depth == pytest.approx(depth, abs=0.06)
    assert prompt.depth == prompt.evidence[0] / 12_000
    subject = {
        "needle": "The pass code of the",
        "multikey": re.search(r'"(.+)"|$', prompt.question)[1],
        "variable_tracking": f"VAR {prompt.answer.split(',')[0]}",
        "dialogue": prompt.answer,
        "code": f"def {prompt.question[6:].split('(')[0]}",
    }[task]
    near = tiny_tokenizer().decode(prompt.token_ids[prompt.evidence[0] :][:200])
    assert subject in near


@pytest.mark.parametrize("task", TASKS)
def test_build_task_ends_with_the_question_and_the_answers_lead(task):
    prompt = build(task)
    between = {"code": "  ", "dialogue": "\n\nAssistant: "}.get(task, "\n\n")
    assert text_of(prompt).endswith(prompt.question + between + prompt.lead)
    chat = text_of(build(task, encoder=CHAT))
    turn = "<|im_end|>\n<|im_start|>assistant\n"
    assert chat.endswith(prompt.question + turn + prompt.lead)


@pytest.mark.parametrize("task", TASKS)
def test_build_task_depends_on_its_key_alone(task):
    assert np.array_equal(build(task).token_ids, build(task).token_ids)
    assert not np.array_equal(build(task).token_ids, build(task, key=("other",)).token_ids)


def test_needle_answer_is_in_the_text_once():
    prompt = build("needle")
    text = text_of(prompt)
    assert text.count(prompt.answer) == 1
    name = re.search(r"pass code of the (.+)\?", prompt.question)[1]
    assert f"The pass code of the {name} is {prompt.answer}." in text


def test_multikey_is_json_that_holds_the_answer():
    prompt = build("multikey")
    text = text_of(prompt)
    pairs = json.loads(text[text.index("{") : text.index("}") + 1])
    assert pairs[prompt.question.split('"')[1]] == prompt.answer
    assert len(pairs) > 50
    assert len(set(pairs.values())) == len(pairs)


def test_variable_tracking_answer_follows_from_the_chain():
    prompt = build("variable_tracking")
    values = {}
    for name, right in re.findall(r"VAR (\w+) = (VAR \w+|\d+)", text_of(prompt)):
        values[name] = values[right[4:]] if right.startswith("VAR") else right
    asked = re.search(r"value (\d+)", prompt.question)[1]
    assert [name for name, value in values.items() if value == asked] == prompt.answer.split(", ")
    assert len(values) == 8


def test_dialogue_recalls_what_the_user_said():
    prompt = build("dialogue")
    text = text_of(prompt)
    turns = re.findall(r"(?m)^(User|Assistant):", text)
    assert len(turns) > 20
    assert turns == ["User", "Assistant"] * (len(turns) // 2)
    assert text.count(prompt.answer) == 1


def test_code_parses_and_prints_the_answer():
    prompt = build("code", length=12_000)
    text = text_of(prompt)
    module = ast.parse(text)
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 15
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(module, "task", "exec"), {})
    assert shown.getvalue().strip() == prompt.answer


def test_code_calls_reach_far_back():
    module = ast.parse(text_of(build("code", length=20_000)))
    places = {
        node.name: number
        for number, node in enumerate(n for n in module.body if isinstance(n, ast.FunctionDef))
    }
    reach = [
        places[node.name] - places[call.func.id]
        for node in module.body
        if isinstance(node, ast.FunctionDef)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in places
    ]
    assert min(reach) > 0
    assert np.mean(reach) > len(places) / 5


@pytest.mark.parametrize("task", ["needle", "dialogue", "code", "variable_tracking"])
def test_filler_is_not_periodic(task):
    text = text_of(build(task, length=30_000))
    lines = [line for line in re.split(r"(?<=[.?!])\s|\n", text) if len(line) > 40]
    assert len(set(lines)) > 0.95 * len(lines)
    # Repeated templates compress a little; repeated text compresses to almost nothing.
    assert len(zlib.compress(text.encode(), 9)) > 0.15 * len(text)


@pytest.mark.parametrize("task", TASKS)
def test_build_task_refuses_a_length_that_cannot_hold_it(task):
    with pytest.raises(RecipeError, match=f"task {task} needs at least [0-9]+ tokens"):
        build(task, length=40)
    with pytest.raises(RecipeError, match=f"source short: task {task} needs"):
        draw_samples(
            recipe(needle(name="short", task=task), lengths=[{"tokens": 40, "samples": 1}]),
            tiny_tokenizer(),
            base_dir=".",
        )


@pytest.mark.parametrize("task", TASKS)
def test_build_task_works_at_the_smallest_length_it_names(task):
    with pytest.raises(RecipeError) as caught:
        build(task, length=40)
    smallest = int(re.search(r"at least (\d+)", str(caught.value))[1])
    assert build(task, length=smallest).token_ids.size == smallest
    with pytest.raises(RecipeError):
        build(task, length=smallest - 1)


def test_build_task_begins_with_bos():
    encoder = Encoder(bos_tokenizer(), chat_template=False)
    prompt = build("needle", encoder=encoder, length=1000)
    assert prompt.token_ids[0] == bos_tokenizer().bos_token_id
    assert prompt.token_ids.size == 1000


def test_depths_are_taken_in_turn_and_spread_without():
    lengths = [{"tokens": 6000, "samples": 3}]
    given_depths = draw_samples(
        recipe(needle(depths=[0.2, 0.8]), lengths=lengths, heldout_fraction=0),
        tiny_tokenizer(),
        base_dir=".",
    )
    assert [s.task.depth for s in given_depths] == pytest.approx([0.2, 0.8, 0.2], abs=0.05)
    depths = sorted(spread_depth(index, "series") for index in range(10))
    gaps = np.diff([0.0, *depths, 1.0])
    assert gaps.max() < 0.25


@given(
    sizes=st.lists(st.integers(1, 50), max_size=20),
    depths=st.lists(st.floats(0, 1), max_size=5),
    reserve=st.integers(0, 30),
)
def test_place_finds_the_nearest_boundary(sizes, depths, reserve):
    depths = sorted(depths)
    bounds = reserve + np.concatenate([[0], np.cumsum(sizes)])
    for found, depth in zip(place(sizes, depths, reserve), depths, strict=True):
        distances = np.abs(bounds - depth * bounds[-1])
        assert distances[found] == pytest.approx(distances.min())
