"""Small calibrations of a tiny model, and comparing what two of them left on disk."""

import json
from pathlib import Path

from patternsearch.calibration.api import calibrate
from patternsearch.calibration.request import CalibrationRequest
from patternsearch.schema.scores import scores_folder_of
from patternsearch.selection.options import SelectionOptions

OUTSIDE_THE_COMPARISON = ("timings", "dates", "ranks")
"""Keys of run.json that may differ between two runs of the same request."""


def tiny_request(model, output, **changes):
    values = {"recipe": "smoke", "grid": "smoke", "lengths": (256,), **changes}
    return CalibrationRequest(model=str(model), output=Path(output), **values)


def run_tiny(model, output, *, progress=None, options=None, **changes):
    return calibrate(
        tiny_request(model, output, **changes),
        options or SelectionOptions(target_mass=0.9),
        progress=progress,
    )


def snapshot(output):
    """Return {relative name: bytes} of everything that must not depend on how a run went."""
    output = Path(output)
    folder = scores_folder_of(output)
    files = {"config": output.read_bytes(), "samples": folder.samples.read_bytes()}
    files.update({path.name: path.read_bytes() for path in sorted(folder.scores.iterdir())})
    run = json.loads(folder.run.read_text())
    for name in OUTSIDE_THE_COMPARISON:
        run.pop(name, None)
    files["run"] = json.dumps(run, sort_keys=True).encode()
    return files


class At:
    """A progress that does something at the k-th layer."""

    def __init__(self, layers, action):
        self.layers = layers
        self.action = action

    def start(self, task, total, unit):
        pass

    def advance(self, task, amount, note=""):
        if task == "calibrate":
            self.layers -= 1
            if self.layers == 0:
                self.action()

    def finish(self, task):
        pass


class InterruptAfter(At):
    """A progress that raises at the k-th layer, as Ctrl-C does."""

    def __init__(self, layers):
        super().__init__(layers, self.interrupt)

    @staticmethod
    def interrupt():
        raise KeyboardInterrupt
