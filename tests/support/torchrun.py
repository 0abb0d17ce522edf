"""Runs of the program over several gloo processes on this machine, as a user would start them."""

import os
import subprocess
import sys

import torch

__all__ = ["calibrate_command", "environment", "start_calibrate"]


def calibrate_command(model, output, *options, processes):
    """Return the command of ``tiny_request`` over some processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    program = ["-m", "patternsearch", "calibrate", str(model), "-o", str(output)]
    request = ["--recipe", "smoke", "--grid", "smoke", "--lengths", "256", "--target-mass", "0.9"]
    return [
        sys.executable,
        *(launcher if processes > 1 else []),
        *program,
        *request,
        "--device",
        "cpu",
        *map(str, options),
    ]


def environment():
    """Return an environment in which each process computes as this one does, bit by bit."""
    return {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}


def start_calibrate(model, output, *options, processes=2):
    """Start the run in a process group of its own."""
    return subprocess.Popen(
        calibrate_command(model, output, *options, processes=processes),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
