"""Finished scores folders of a made-up model, run.json included."""

from patternsearch.schema.config import Calibration, Fingerprints, ModelIdentity, Provenance
from support.configs import make_model, sha
from support.scores_factory import scores_frame, write_scores


def run_document(frame, num_layers=2, num_heads=4):
    """What run.json of a finished calibration says about these scores."""
    samples = frame.drop_duplicates("sample_id")
    names = ["sample_id", "source", "split", "length", "num_tokens"]
    model = ModelIdentity.model_validate(
        make_model(num_layers=num_layers, num_query_heads=num_heads, num_kv_heads=2, head_dim=128)
    )
    calibration = Calibration(
        recipe="test", recipe_sha256=sha("recipe"), grid="test", grid_sha256=sha("grid"), seed=0,
        lengths=tuple(sorted({int(n) for n in samples["length"]})), consumer="patternsearch",
        oracle=False, row_sample=1.0, extrapolated=False,
        samples=[{**row, "sha256": sha("s")} for row in samples[names].to_dict("records")],
    )  # fmt: skip
    values = [[[0.5] * 12] * num_heads] * num_layers
    return {
        "format": "patternsearch/run",
        "status": "complete",
        "model": model.model_dump(mode="json"),
        "calibration": calibration.model_dump(mode="json"),
        "fingerprints": Fingerprints(seed=1, num_tokens=512, values=values).model_dump(mode="json"),
        "provenance": Provenance(patternsearch="0", device="cpu").model_dump(mode="json"),
    }


def finished_scores(root, **frame_options):
    """A scores folder as calibrate leaves it: 2 layers of 4 heads, lengths 1024 and 4096."""
    frame = scores_frame(num_heads=4, **{"lengths": (1024, 4096), **frame_options})
    return write_scores(root, frame, run_document(frame))
