"""What a long run says while it runs: speed, layer, all ranks; a line a minute off a terminal."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from patternsearch.calibration.distributed import Team
from patternsearch.calibration.loop import Meter
from patternsearch.cli import _progress
from patternsearch.cli._progress import JsonEvents, Lines


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_progress, "time", clock)
    return clock


def test_line_a_minute_without_a_terminal(clock):
    out = io.StringIO()
    lines = Lines(Console(file=out, width=200))
    lines.start("calibrate", 100.0, "multiply-adds")
    for _ in range(100):
        clock.now += 3
        lines.advance("calibrate", 1.0, "sample 1/2, 512 tokens, layer 3")
    said = out.getvalue().splitlines()
    assert len(said) == 5
    assert "20%" in said[0]
    assert "240 s left" in said[0]
    assert "layer 3" in said[0]


def test_json_events_say_how_far(clock, capsys):
    events = JsonEvents()
    events.start("calibrate", 4.0, "multiply-adds")
    for _ in range(4):
        clock.now += 2
        events.advance("calibrate", 1.0, "layer 0")
    events.finish("calibrate")
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [event["event"] for event in said] == ["start", *["advance"] * 4, "end"]
    assert [event["done"] for event in said[1:5]] == [1.0, 2.0, 3.0, 4.0]


class Heard:
    def __init__(self):
        self.amount = 0.0
        self.notes = []

    def start(self, task, total, unit):
        pass

    def advance(self, task, amount, note=""):
        self.amount += amount
        self.notes.append(note)

    def finish(self, task):
        pass


def model(device="cpu"):
    return SimpleNamespace(full_layers=(0, 1), device=torch.device(device))


def test_meter_names_speed_layer_and_gpu_memory(monkeypatch):
    heard = Heard()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    meter = Meter(Team(), model("cuda"), heard, 10.0)
    meter.start()
    meter._started -= 2.0
    meter.layer_done(5.0, 1000, "sample 1/1, 1000 tokens, layer 0")
    assert "layer 0, " in heard.notes[0]
    assert "GPU 3.0 GiB" in heard.notes[0]
    assert 200 < float(heard.notes[0].split(" tokens/s")[0].split(", ")[-1].replace(",", "")) <= 250


class Counters:
    """The part of a torch.distributed store that counting needs."""

    def __init__(self):
        self.values = {}

    def add(self, name, amount):
        self.values[name] = self.values.get(name, 0) + amount
        return self.values[name]


def test_leader_shows_the_work_of_all_ranks():
    store = Counters()
    heard = Heard()
    leader, other = (Team(rank, 2, 1, rank, store) for rank in (0, 1))
    ours = Meter(leader, model(), heard, 4e6)
    theirs = Meter(other, model(), Heard(), 0.0)
    ours.start()
    theirs.layer_done(1e6, 64, "")
    ours.layer_done(1e6, 64, "layer 0")
    theirs.layer_done(2e6, 64, "")
    ours.refresh("waiting for 1 ranks")
    assert heard.amount == 4e6
    assert heard.notes[-1].startswith("waiting for 1 ranks, ")
    assert theirs.progress.notes == []
