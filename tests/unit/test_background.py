"""Work in a thread of its own: its result or error reaches who waits, and nobody's wait is lost."""

import io
import sys
import threading

import pytest

from patternsearch.errors import ModelError
from patternsearch.model.background import Background
from patternsearch.model.loading import open_model
from patternsearch.model.quiet import quiet_library
from support.tiny_models import tiny_model_dir


class Recorder:
    def __init__(self):
        self.said = []

    def start(self, task, total, unit):
        self.said.append(("start", task, threading.get_ident()))

    def advance(self, task, amount, note=""):
        self.said.append(("advance", amount, note))

    def finish(self, task):
        self.said.append(("finish", task))


def test_result_and_progress_come_from_another_thread():
    def work(progress):
        progress.start("t", 2, "items")
        progress.advance("t", 2, "both")
        progress.finish("t")
        return 7

    recorder = Recorder()
    with Background(work, recorder) as running:
        assert running.result() == 7
    start, *rest = recorder.said
    assert start[:2] == ("start", "t")
    assert start[2] != threading.get_ident()
    assert rest == [("advance", 2, "both"), ("finish", "t")]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_error_is_raised_where_the_result_is_wanted(error):
    def work(progress):
        raise error

    with pytest.raises(type(error)), Background(work) as running:
        running.result()


def test_leaving_ends_the_thread_at_its_next_word():
    goes_on, ended = threading.Event(), threading.Event()

    def work(progress):
        try:
            goes_on.wait(10)
            progress.advance("t", 1)
        finally:
            ended.set()

    with pytest.raises(ModelError, match="first"), Background(work) as running:
        raise ModelError("first")
    goes_on.set()
    assert ended.wait(10)
    assert running._error is not None


def test_weights_that_fail_to_load_end_the_digest(tmp_path, monkeypatch):
    opened = open_model(tiny_model_dir(tmp_path), require_tokenizer=False)
    assert opened.identity.weights_sha256 is None

    def fail(*arguments):
        raise ModelError("incomplete")

    monkeypatch.setattr("patternsearch.model.loading._load_weights", fail)
    with pytest.raises(ModelError, match="incomplete"):
        opened.load()


def test_quiet_library_mutes_its_own_thread_alone(monkeypatch):
    heard = io.StringIO()
    monkeypatch.setattr(sys, "stderr", heard)
    with quiet_library():
        print("here", file=sys.stderr)
        other = threading.Thread(target=lambda: print("there", file=sys.stderr))
        other.start()
        other.join()
    print("after", file=sys.stderr)
    assert heard.getvalue() == "there\nafter\n"
