"""Calibration and validation on two GPUs of one host, against one GPU: results, time, faults.

    PYTHONPATH=src:tests python scripts/measure_two_gpus.py --part all --out two_gpus.json
    PYTHONPATH=src:tests python scripts/measure_two_gpus.py --device cpu      # a rehearsal, gloo

Every run is the real program in processes of its own, started by torchrun where there are two. The
models are random, of the shapes of Llama-3.2-1B and Llama-3.1-8B but for their vocabulary (that of
a byte-level tokenizer) and, with --tp-layers, the number of layers; their heads differ in
sharpness. The text is the source of transformers.

dp       Data parallel over samples: the files of two processes against those of one; wall time of
         the whole process and of the sampling alone (forward to write, first process).
tp       One copy of the model on two ranks: every head's scores and fingerprint against one GPU;
         time and memory by rank; a config's attention by rank, measured against predicted.
kill     SIGKILL to one rank in the middle, of a data-parallel run (the first rank) and of a
         tensor-parallel one (the second); a tensor-parallel rank that fails while the other waits
         for it in a collective: when the other ends, what is lost, whether the resumed run has the
         bytes of an undisturbed one.
mapping  `validate --level mapping` by two running ranks: right ones pass; a rank that reads the
         other's entries, and one that holds the other's heads, are named.

--out is rewritten after every part and within the longest, and with --work the same command goes on
where it stopped: a time-out loses nothing.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from patternsearch.exchange.ranks import rank_layout
from patternsearch.patterns.tensor_parallel import query_head_range
from patternsearch.runtime.mapping import compare_mapping
from patternsearch.schema.io import load_config
from patternsearch.schema.scores import MASS_COLUMNS, scores_folder_of
from support.calibrated import snapshot

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("dp", "tp", "kill", "mapping")
RANKS = 2
SAMPLING = ("forward", "score", "gather", "aggregate", "write", "wait")
"""Phases of run.json that belong to the samples; the others are spent once a run."""

SHAPES = {
    "1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv": 8, "dim": 64, "mlp": 8192},
    "8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv": 8, "dim": 128, "mlp": 14_336},
    "tiny": {"layers": 3, "hidden": 64, "heads": 4, "kv": 2, "dim": 16, "mlp": 96},
    "tiny8": {"layers": 2, "hidden": 128, "heads": 8, "kv": 4, "dim": 16, "mlp": 96},
}
KEYS = ["sample_id", "layer", "head", "kind", "sink", "window", "vertical", "slash", "diagonals",
        "blocks", "tile", "estimator", "index"]  # fmt: skip
RECIPE = """\
format: patternsearch/recipe
schema_version: 1
name: two-gpus
seed: 0
heldout_fraction: 0.0
lengths: [{tokens: 8192, samples: 1}]
sources:
  - kind: package
    name: transformers
    package: transformers
    files: ["models/*/modeling_*.py"]
    min_chars: 4000
"""


@dataclass(frozen=True)
class Sizes:
    """What is run; the defaults of a device."""

    dp_model: str
    dp_length: int
    dp_samples: int
    tp_model: str
    tp_length: int
    tp_layers: int
    tp_budget: float
    kill_length: int
    kill_samples: int
    grid: str
    threads: int


SIZES = {
    "cuda": Sizes("1b", 32_768, 400, "8b", 131_072, 8, 0.3, 8192, 12, "default", 8),
    "cpu": Sizes("tiny", 256, 4, "tiny8", 256, 2, 0.8, 256, 6, "smoke", 1),
}


# --- comparing two runs ----------------------------------------------------------------------


def compare_files(ours, theirs):
    """Compare what two runs left on disk byte for byte, but for times."""
    a, b = snapshot(ours), snapshot(theirs)
    differing = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    return {"files": len(b), "differing_files": len(differing), "differing": differing[:3]}


def compare_scores(ours, theirs):
    """Compare two score tables row by row.

    ``ids``: rows of the same candidate of the same head. Counts are tiles and columns, which say
    what the index chose; masses are compared where they are.
    """
    a, b = (frame.sort_values(KEYS, ignore_index=True) for frame in (ours, theirs))
    if not a[KEYS].equals(b[KEYS]):
        return {"rows": len(b), "same_rows": False}
    masses = [*MASS_COLUMNS, "mass_logical"]
    gaps = np.abs(a[masses].to_numpy(float) - b[masses].to_numpy(float))
    same = (a[["tiles", "columns"]].to_numpy() == b[["tiles", "columns"]].to_numpy()).all(axis=1)
    return {
        "rows": len(b),
        "same_rows": True,
        "largest_mass_gap": float(np.nanmax(gaps)),
        "mean_mass_gap": float(np.nanmean(gaps)),
        "equal_counts": float(same.mean()),
    }


def heads_at_home(ours, theirs):
    """Return how many heads' score vectors are nearest to the same head's, of how many.

    Both tables hold the same rows; a head is compared with all heads of its layer.
    """
    tables = []
    for frame in (ours, theirs):
        rest = [key for key in KEYS if key not in ("layer", "head")]
        wide = frame.sort_values(KEYS).assign(
            row=lambda t, rest=rest: t.groupby(["layer", "head"], sort=False).cumcount()
        )
        tables.append(wide.pivot(index=["layer", "head"], columns="row", values="mass_physical"))
    at_home, total = 0, 0
    for layer in tables[0].index.unique("layer"):
        a, b = (table.loc[layer].to_numpy(float) for table in tables)
        nearest = np.abs(a[:, None] - b[None]).mean(-1).argmin(1)
        at_home += int((nearest == np.arange(len(a))).sum())
        total += len(a)
    return at_home, total


def predicted_by_rank(config, size):
    """Return each rank's predicted milliseconds, or the pairs that it executes if unmeasured.

    At the longest length, over all layers.
    """
    layout = rank_layout(config.model, config.heads, size)
    times = [rank.predicted_ms for rank in layout.ranks]
    if None not in times:
        return times, "ms"
    pairs = []
    for rank in range(size):
        first, end = query_head_range(config.model.num_query_heads, size, rank)
        heads = [entry for layer in config.heads for entry in (layer or ())[first:end]]
        pairs.append(sum(map(_pairs, heads)))
    return pairs, "pairs"


def _pairs(entry):
    tile, at = getattr(entry.pattern, "tile", 64), entry.lengths[-1]
    return at.tiles * tile**2 + at.columns * tile


def slowest_over_mean(values):
    return max(values) / (sum(values) / len(values)) if sum(values) else float("nan")


# --- processes -------------------------------------------------------------------------------


class Failed(Exception):
    """A process ended otherwise than it should."""


def environment(threads, **more):
    path = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    )
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, **more}


def launcher(ranks):
    """Return the begin of a command; the address spares a host without a name a look-up."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    count = ["--nproc-per-node", str(ranks)]
    return [sys.executable, *([*torchrun, *count] if ranks > 1 else [])]


def rank_processes(pid):
    """Return {rank: pid} of the processes that a launcher has started."""
    found = {}
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with suppress(OSError):
                for item in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                    if item.startswith(b"RANK="):
                        found[int(item[5:])] = int(child)
    return found


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def end(process):
    """End a process that we started, and the ranks that it has started."""
    ranks = rank_processes(process.pid).values()
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Runner:
    """Starts programs with one environment, and logs what they say."""

    def __init__(self, work, sizes, device, timeout, timings=None, keep=lambda part, result: None):
        self.work, self.sizes, self.device = work, sizes, device
        self.timeout, self.timings = timeout, timings
        self.keep = keep  # writes what a part has so far

    def start(self, name, command, **variables):
        log = (self.work / f"{name}.log").open("w")
        return subprocess.Popen(
            command,
            env=environment(self.sizes.threads, **variables),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
        )

    def run(self, name, command, *, codes=(0,), **variables):
        """Run to the end; return (seconds, stdout)."""
        began = time.monotonic()
        process = self.start(name, command, **variables)
        try:
            out, _ = process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired:
            end(process)
            raise Failed(f"{name} ran past {self.timeout} s: {self.tail(name)}") from None
        seconds = time.monotonic() - began
        if process.returncode not in codes:
            raise Failed(f"{name} ended with {process.returncode}: {self.tail(name)}")
        print(f"  {name}: {seconds:.1f} s", flush=True)
        return seconds, out

    def tail(self, name):
        return (self.work / f"{name}.log").read_text()[-1500:]

    def calibrate_command(self, model, output, *, length, samples, ranks=1, tp=1, more=()):
        grid = ["--grid", self.sizes.grid, "--target-mass", "0.9", "--device", self.device]
        size = ["--lengths", str(length), "--samples", str(samples), "--tp-ranks", str(tp)]
        return [*launcher(ranks), "-m", "patternsearch", "calibrate", str(model), "-o", str(output),
                "--recipe", str(self.work / "recipe.yaml"), *grid, *size, "--offline", "--json",
                *more]  # fmt: skip

    def calibrate(self, name, model, **options):
        """Calibrate afresh; return (config path, seconds)."""
        output = self.work / f"{name}.yaml"
        variables = options.pop("variables", {})
        command = self.calibrate_command(model, output, **options, more=["--fresh"])
        seconds, _ = self.run(name, command, **variables)
        return output, seconds

    def worker(self, name, *arguments, ranks=1, **variables):
        command = [
            *launcher(ranks),
            str(Path(__file__).resolve()),
            "--worker",
            *map(str, arguments),
        ]
        return self.run(name, [*command, "--device", self.device], **variables)


def run_record(config):
    return json.loads(scores_folder_of(config).run.read_text())


def scores_of(config):
    return pd.read_parquet(scores_folder_of(config).scores)


def sampling_seconds(config, phases=SAMPLING):
    timings = run_record(config)["timings"]
    return sum(timings.get(name, 0.0) for name in phases)


def by_rank(config):
    """Return what each rank of a run spent, for people."""
    return [
        {
            "device": rank["device"],
            "samples": rank["samples"],
            "peak_gib": None
            if rank["peak_bytes"] is None
            else round(rank["peak_bytes"] / 2**30, 2),
            "seconds": {name: round(value, 2) for name, value in sorted(rank["seconds"].items())},
        }
        for rank in run_record(config)["ranks"]
    ]


# --- parts -----------------------------------------------------------------------------------


def part_dp(runner, models):
    sizes, model = runner.sizes, models["dp"]
    run = {"length": sizes.dp_length, "samples": sizes.dp_samples}
    single, single_s = runner.calibrate("dp_single", model, **run)
    double, double_s = runner.calibrate("dp_double", model, ranks=RANKS, **run)
    sampling = [sampling_seconds(config) for config in (single, double)]
    result = {
        "model": sizes.dp_model,
        **run,
        **compare_files(double, single),
        **compare_scores(scores_of(double), scores_of(single)),
        "process_s": [round(single_s, 2), round(double_s, 2)],
        "process_ratio": round(double_s / single_s, 3),
        "sampling_s": [round(seconds, 2) for seconds in sampling],
        "sampling_ratio": round(sampling[1] / sampling[0], 3),
        "single": by_rank(single),
        "ranks": by_rank(double),
    }
    result["checks"] = {
        "index choices equal": result.get("equal_counts") == 1.0,
        "masses within 1e-5": result.get("largest_mass_gap", 1.0) <= 1e-5,
        "sampling <= 0.6 of one GPU": result["sampling_ratio"] <= 0.6,
        "whole process <= 0.6 of one GPU": result["process_ratio"] <= 0.6,
    }
    return result


def part_tp(runner, models):
    sizes, model = runner.sizes, models["tp"]
    run = {"length": sizes.tp_length, "samples": 1}
    single, single_s = runner.calibrate("tp_single", model, **run)
    double, double_s = runner.calibrate("tp_double", model, ranks=RANKS, tp=RANKS, **run)
    ours, theirs = scores_of(double), scores_of(single)
    configs = [load_config(path) for path in (double, single)]
    mapping = compare_mapping(configs[1].fingerprints, configs[0].fingerprints, configs[1].model)
    at_home, heads = heads_at_home(ours, theirs)
    sampling = [sampling_seconds(config) for config in (single, double)]
    result = {
        "model": f"{sizes.tp_model}, {sizes.tp_layers} layers",
        **run,
        **compare_scores(ours, theirs),
        "heads_at_home": [at_home, heads],
        "fingerprints": mapping.verdict,
        "fingerprint_findings": [finding.text for finding in mapping.findings],
        "fingerprint_median_distance": mapping.median_distance,
        "process_s": [round(single_s, 2), round(double_s, 2)],
        "sampling_s": [round(seconds, 2) for seconds in sampling],
        "sampling_ratio": round(sampling[1] / sampling[0], 3),
        "single": by_rank(single),
        "ranks": by_rank(double),
    }
    result["checks"] = {
        "every head's scores are nearest to its own": at_home == heads,
        "every fingerprint finds itself": mapping.ok,
        "mean mass gap <= 0.01": result.get("mean_mass_gap", 1.0) <= 0.01,
    }
    runner.keep("tp", result)
    try:
        result["attention"] = attention_by_rank(runner, model, double)
    except Exception as error:  # what was measured before is worth having
        result["attention"] = {"error": f"{type(error).__name__}: {error}"}
        result["checks"]["attention by rank was measured"] = False
    return result


def attention_by_rank(runner, model, calibrated):
    """Run two configs of these scores on the ranks: balanced over them, and not."""
    configs = {}
    for name, tp_size in (("balanced", RANKS), ("unbalanced", 1)):
        path = runner.work / f"tp_{name}.yaml"
        select = ["-m", "patternsearch", "select", str(scores_folder_of(calibrated).root), "-o",
                  str(path), "--objective", "mass", "--budget-fraction",
                  str(runner.sizes.tp_budget), "--tp-size", str(tp_size)]  # fmt: skip
        timings = ["--timings", str(runner.timings)] if runner.timings else []
        runner.run(f"tp_select_{name}", [sys.executable, *select, *timings])
        configs[name] = path
    paths = list(configs.values())
    runner.worker("tp_prefill", "prefill", model, runner.sizes.tp_length, *paths, ranks=RANKS)
    measured = [json.loads((runner.work / f"prefill_{r}.json").read_text()) for r in range(RANKS)]
    rows = {}
    for name, path in configs.items():
        predicted, unit = predicted_by_rank(load_config(path), RANKS)
        found = [rank[path.stem]["index_ms"] + rank[path.stem]["attention_ms"] for rank in measured]
        rows[name] = {
            f"predicted_{unit}": [round(value, 2) for value in predicted],
            "measured_ms": [round(value, 2) for value in found],
            "predicted_slowest_over_mean": round(slowest_over_mean(predicted), 3),
            "measured_slowest_over_mean": round(slowest_over_mean(found), 3),
            "phases_ms": [rank[path.stem] for rank in measured],
        }
        if unit == "ms":
            rows[name]["slowest_predicted_over_measured"] = round(max(predicted) / max(found), 3)
    rows["dense_ms"] = [rank["dense"] for rank in measured]
    rows["peak_gib"] = [rank["peak_gib"] for rank in measured]
    return rows


def part_kill(runner, models):
    def one(mode):
        tp = 1 if mode == "dp" else RANKS
        options = {
            "length": runner.sizes.kill_length,
            "samples": runner.sizes.kill_samples,
            "ranks": RANKS,
            "tp": tp,
        }
        calm, _ = runner.calibrate(f"kill_{mode}_calm", models["dp"], **options)
        if mode == "dp":
            return {"dp, rank 0 killed": disturb(runner, models["dp"], calm, options, 0)}
        return {
            "tp, rank 1 killed": disturb(runner, models["dp"], calm, options, 1),
            "tp, rank 1 fails": disturb(runner, models["dp"], calm, options, None),
        }

    with ThreadPoolExecutor(2) as pool:
        result = {name: row for rows in pool.map(one, ("dp", "tp")) for name, row in rows.items()}
    result["checks"] = {
        f"{name}: {what}": ok
        for name, row in result.items()
        for what, ok in {
            "the other ends within 60 s": row["ended_after_s"] < 60 and row["exit_code"] != 0,
            "no finished sample is scored again": row["parts_kept"] == row["parts"] > 0,
            "the resumed run has the undisturbed bytes": row["differing_files"] == 0,
        }.items()
    }
    return result


def disturb(runner, model, calm, options, victim):
    """End one rank in the middle of a run, resume it, and compare with an undisturbed run.

    ``victim`` is the rank to kill; None lets rank 1 fail by itself, before its third sample.
    """
    name = calm.stem.replace("calm", "hit" if victim is not None else "fails")
    output = calm.with_stem(name)
    shutil.rmtree(scores_folder_of(output).root, ignore_errors=True)
    output.unlink(missing_ok=True)
    command = runner.calibrate_command(model, output, **options)
    folder = scores_folder_of(output).scores
    raised = runner.work / f"{name}.raised"
    if victim is None:
        at = command.index("-m", command.index("--nproc-per-node"))
        faulty = [str(ROOT / "tests" / "support" / "rank_faults.py"), "raises"]
        process = runner.start(
            name, command[:at] + faulty + command[at + 2 :], RAISED_AT=str(raised)
        )
    else:
        process = runner.start(name, command)
    try:
        if victim is None:
            process.communicate(timeout=runner.timeout + 60)
            began = float(raised.read_text())
        else:
            began = kill_rank(runner, process, folder, victim)
            process.communicate(timeout=120)
        ended = time.monotonic() - began
    except (subprocess.TimeoutExpired, OSError) as error:
        raise Failed(f"{name}: {type(error).__name__}: {runner.tail(name)}") from None
    finally:
        if process.poll() is None:
            end(process)
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*.parquet")}
    _, out = runner.run(f"{name}_resumed", command)
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*.parquet")}
    return {
        "ended_after_s": round(ended, 2),
        "exit_code": process.returncode,
        "samples": options["samples"],
        "parts": len(before),
        "parts_kept": sum(after.get(part) == when for part, when in before.items()),
        "num_resumed": json.loads(out)["num_resumed"],
        **compare_files(output, calm),
    }


def kill_rank(runner, process, folder, victim):
    """Kill a rank once a third of the samples is on disk; return when."""
    began = time.monotonic()
    while len(list(folder.glob("part-*.parquet"))) < max(1, runner.sizes.kill_samples // 3):
        if process.poll() is not None or time.monotonic() - began > runner.timeout:
            raise Failed(f"no rank to kill in {folder.parent.name}")
        time.sleep(0.003)
    ranks = rank_processes(process.pid)
    os.kill(ranks[victim], signal.SIGKILL)
    killed = time.monotonic()
    while any(is_alive(pid) for pid in ranks.values()) and time.monotonic() - killed < 100:
        time.sleep(0.01)
    print(
        f"  {folder.parent.name}: all ranks gone {time.monotonic() - killed:.1f} s after the kill"
    )
    return killed


def part_mapping(runner, models):
    sizes, model = runner.sizes, models["dp"]
    config = runner.work / "dp_single.yaml"
    if not config.exists():
        config, _ = runner.calibrate("mapping_config", model, length=sizes.kill_length, samples=1)
    faults = {"none": 0, "entries": 1, "weights": 1}

    def check(fault):
        program = str(ROOT / "tests" / "support" / "rank_faults.py")
        command = [*launcher(RANKS), program, fault, "validate", str(config), str(model), "--level",
                   "mapping", "--tp-size", str(RANKS), "--device", runner.device, "--offline",
                   "--json"]  # fmt: skip
        seconds, out = runner.run(f"mapping_{fault}", command, codes=(0, 1))
        report = json.loads(out)
        findings = [finding["text"] for finding in report["mapping"]["findings"]]
        return {
            "seconds": round(seconds, 1),
            "status": report["status"],
            "findings": findings,
            "notes": report["notes"],
            "similarity": report["mapping"]["similarity"],
        }

    with ThreadPoolExecutor(len(faults)) as pool:
        result = dict(zip(faults, pool.map(check, faults), strict=True))
    heads = load_config(config).model.num_query_heads
    theirs, own = query_head_range(heads, RANKS, 0), query_head_range(heads, RANKS, 1)
    span = f"heads {theirs[0]}–{theirs[1] - 1} instead of {own[0]}–{own[1] - 1}"
    result["checks"] = {
        "right ranks pass": result["none"]["status"] == "ok",
        "wrong entries are named": result["entries"]["findings"] == [f"rank 1 of 2 reads {span}"],
        "wrong weights are named": result["weights"]["findings"] == [f"rank 1 of 2 holds {span}"],
    }
    return result


RUN = {"dp": part_dp, "tp": part_tp, "kill": part_kill, "mapping": part_mapping}


def prepare(runner, parts):
    """Build the models and compile the kernels, two at a time."""
    sizes = runner.sizes
    (runner.work / "recipe.yaml").write_text(RECIPE)
    wanted = {}
    if set(parts) - {"tp"}:
        shape = SHAPES[sizes.dp_model]
        wanted["dp"] = (sizes.dp_model, shape["layers"], sizes.dp_length)
    if "tp" in parts:
        wanted["tp"] = (sizes.tp_model, sizes.tp_layers, sizes.tp_length)

    def one(place):
        number, (name, (shape, layers, length)) = place
        gpu = {"CUDA_VISIBLE_DEVICES": str(number % RANKS)} if runner.device == "cuda" else {}
        folder = runner.work / f"model_{name}"
        if not (folder / "done").exists():
            runner.worker(f"build_{name}", "build", folder, shape, layers, **gpu)
        if runner.device == "cuda":
            try:
                runner.calibrate(f"warm_{name}", folder, length=length, samples=1, variables=gpu)
            except Failed as error:  # the first measured run compiles, then
                print(f"  {error}", flush=True)
        return name, folder

    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(one, enumerate(wanted.items())))


# --- workers: what runs in processes of its own ----------------------------------------------


def build(folder, shape, layers, device):
    """Write a random checkpoint whose heads differ in sharpness, and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from support.tiny_models import VOCAB_SIZE, write_tokenizer

    s = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=s["hidden"],
        intermediate_size=s["mlp"],
        num_hidden_layers=layers,
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv"],
        head_dim=s["dim"],
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        max_position_embeddings=2**20,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.set_default_dtype(dtype)
    with torch.device(device), torch.no_grad():
        model = LlamaForCausalLM(config)
        gain = torch.linspace(0.5, 3.0, s["heads"])
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            narrow = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.normal_(0.0, (0.3 if narrow else 1.0) * parameter.shape[-1] ** -0.5)
            if "embed" in name:
                # What all tokens share makes each head prefer offsets of its own.
                parameter.normal_(0.0, 1.0).add_(torch.randn(s["hidden"]).to(dtype))
            if name.endswith("q_proj.weight"):
                order = gain[torch.randperm(s["heads"])].to(dtype)
                parameter.mul_(order.repeat_interleave(s["dim"])[:, None])
    folder = Path(folder)
    model.save_pretrained(folder, max_shard_size="2GB")
    write_tokenizer(folder)
    (folder / "done").write_text("")


def prefill(model, length, configs, device):
    """Time the attention of this tensor-parallel rank, dense and under each config."""
    import torch

    from patternsearch.calibration.distributed import joined
    from patternsearch.model.loading import load_model
    from patternsearch.runtime.prefill_timing import time_prefill

    with joined(RANKS, device) as team:
        loaded = load_model(model, device=team.device(device), tensor_parallel=RANKS,
                            digests=False, require_tokenizer=False, offline=True)  # fmt: skip
        samples = pd.read_parquet(
            scores_folder_of(Path(configs[0]).with_name("tp_double.yaml")).samples
        )
        ids = torch.tensor(samples.token_ids[0][: int(length)], dtype=torch.int64)[None]
        result = {}
        for path in map(Path, configs):
            config = load_config(path)
            for run in ("dense", "sparse") if not result else ("sparse",):
                count = 1 if run == "dense" else 3
                times = time_prefill(loaded.model, config, ids, run=run, repetitions=count)
                name = "dense" if run == "dense" else path.stem
                result[name] = {
                    k: round(v, 2) for k, v in times.model_dump().items() if k.endswith("_ms")
                }
        is_cuda = loaded.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(loaded.device) / 2**30 if is_cuda else None
        result["peak_gib"] = peak and round(peak, 2)
        Path(configs[0]).with_name(f"prefill_{team.rank}.json").write_text(json.dumps(result))
        team.finish({})
        team.wait(lambda _ranks: None)


# --- command ---------------------------------------------------------------------------------


def fast_folder():
    """Return a folder in memory if it has room for the models, else None for the usual one."""
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 10 * 2**30
    return memory if has_room else None


def facts(device):
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else None
    variables = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return {"device": device, "gpus": gpus, "torch": torch.__version__, "nccl": nccl,
            "environment": variables, "cores": os.cpu_count()}  # fmt: skip


SHOWN = ("process_s", "process_ratio", "sampling_s", "sampling_ratio", "differing_files",
         "largest_mass_gap", "mean_mass_gap", "equal_counts", "heads_at_home", "fingerprints",
         "fingerprint_median_distance")  # fmt: skip


def table(results):
    """Return the outcome in lines."""
    lines = []
    for part in (name for name in PARTS if name in results):
        result = results[part]
        lines.append(f"{part} ({result['part_s']} s)")
        if "error" in result:
            lines.append(f"  failed: {result['error'][-600:]}")
        lines += [f"  {name:28} {result[name]}" for name in SHOWN if name in result]
        for name in ("single", "ranks"):
            lines += [f"  {name:8} {json.dumps(row)}" for row in result.get(name, ())]
        lines += [
            f"  {name:11} {json.dumps(row)}" for name, row in result.get("attention", {}).items()
        ]
        lines += [
            f"  {name:11} {json.dumps(row, ensure_ascii=False)}"
            for name, row in result.items()
            if part in ("kill", "mapping") and isinstance(row, dict) and name != "checks"
        ]
        lines += [
            f"  {'ok  ' if ok else 'FAIL'} {name}" for name, ok in result.get("checks", {}).items()
        ]
    return lines


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="all", help="dp, tp, kill, mapping, some of them, or all")
    parser.add_argument("--out", type=Path, help="JSON to write after every part")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, help="folder of models and runs, kept; else temporary")
    parser.add_argument("--timings", type=Path, help="timing table to predict rank times from")
    parser.add_argument("--timeout", type=float, default=400.0, help="of one process, seconds")
    for name in (
        "dp-length",
        "dp-samples",
        "tp-length",
        "tp-layers",
        "kill-length",
        "kill-samples",
    ):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--tp-budget", type=float, help="of the timed configs, of dense")
    parser.add_argument("--grid")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main():
    options = arguments()
    if options.worker:
        name, *rest = options.worker
        if name == "build":
            build(rest[0], rest[1], int(rest[2]), options.device)
        else:
            prefill(rest[0], rest[1], rest[2:], options.device)
        return 0
    given = {k: v for k, v in vars(options).items() if k in Sizes.__annotations__ and v is not None}
    sizes = replace(SIZES[options.device], **given)
    parts = PARTS if options.part == "all" else tuple(options.part.split(","))
    work = options.work or Path(tempfile.mkdtemp(prefix="two-gpus-", dir=fast_folder()))
    work.mkdir(parents=True, exist_ok=True)
    results = {"facts": facts(options.device), "sizes": asdict(sizes)}

    def keep(part, result):
        results[part] = result
        if options.out:
            options.out.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")

    runner = Runner(work, sizes, options.device, options.timeout, options.timings, keep)
    began = time.monotonic()
    try:
        print("models", flush=True)
        models = prepare(runner, parts)
        results["prepare_s"] = round(time.monotonic() - began, 1)
        for part in parts:
            print(part, flush=True)
            start = time.monotonic()
            try:
                result = RUN[part](runner, models)
            except Exception as error:  # the other parts are worth having
                result = {"error": f"{type(error).__name__}: {error}"}
            keep(part, {**result, "part_s": round(time.monotonic() - start, 1)})
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    print("\n".join(table(results)))
    checks = [ok for part in parts for ok in results[part].get("checks", {"": False}).values()]
    return 0 if all(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
