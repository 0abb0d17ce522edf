"""Ranks forked from a process that has imported everything: many short distributed runs, cheaply.

The ranks are processes that meet as under torchrun, through its environment variables; what is
missing is torchrun. One command a line on stdin, one reply a line on stdout.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

from support.torchrun import calibrate_command, environment

__all__ = ["Nursery"]

_PR_SET_CHILD_SUBREAPER = 36


class Nursery:
    """Starts runs of `tiny_request` over some ranks; a context manager."""

    def __enter__(self):
        paths = [str(Path(__file__).parents[1]), *sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.forked_ranks"],
            env={**environment(), "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, **command):
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, model, output, *options, ranks=2):
        """Start a run in a process group of its own and return the group's number."""
        command = calibrate_command(model, output, *options, processes=1)
        arguments = command[command.index("patternsearch") + 1 :]
        return self._ask(arguments=arguments, ranks=ranks, log=str(output) + ".log")

    def is_running(self, group):
        """Return whether a process of the group lives."""
        return self._ask(poll=group) is None

    def kill(self, group):
        """Kill all processes of the group with SIGKILL, wait, and return how many that ended."""
        return self._ask(kill=group).count(-signal.SIGKILL)

    def complete(self, group):
        """Wait for a run and check that all its ranks ended well."""
        while (codes := self._ask(poll=group)) is None:
            time.sleep(0.01)
        assert not any(codes), codes


def _rank(rank, ranks, port, arguments, log):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    sys.argv = ["patternsearch", *arguments]
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from patternsearch.cli.app import main

    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _start(arguments, ranks, log):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    group = 0
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.setpgid(0, group)
            _rank(rank, ranks, port, arguments, log)
        group = group or child
        with contextlib.suppress(PermissionError):  # it has done so itself
            os.setpgid(child, group)
    return group


def _serve():
    import transformers.models.llama.modeling_llama  # noqa: F401

    import patternsearch.calibration.api
    import patternsearch.calibration.follower
    import patternsearch.calibration.run
    import patternsearch.cli._summary
    import patternsearch.cli.app
    import patternsearch.cli.calibrate  # noqa: F401

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ended = {}

    def reap(group, options):
        codes = ended.setdefault(group, [])
        try:
            while True:
                pid, status = os.waitpid(-group, options)
                if pid == 0:
                    return None
                codes.append(os.waitstatus_to_exitcode(status))
        except ChildProcessError:
            return codes

    for line in sys.stdin:
        command = json.loads(line)
        if "poll" in command:
            reply = reap(command["poll"], os.WNOHANG)
        elif "kill" in command:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command["kill"], signal.SIGKILL)
            reply = reap(command["kill"], 0)
        else:
            reply = _start(**command)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    _serve()
