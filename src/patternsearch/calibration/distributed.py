# SPDX-License-Identifier: Apache-2.0
"""The processes of one run: who they are, what they tell each other, and how they end together.

A run of W processes is W / T copies of the model, each on T tensor-parallel ranks. The copies
share nothing but the list of samples, so they need no collective: they meet at the store through
which torch.distributed found them. The T ranks of one copy are a torch.distributed world of their
own (NCCL on CUDA, gloo on the CPU), in which transformers shards the model by its own plan; it
asks that a tensor-parallel world hold nothing else.

Messages are JSON, never pickles. Nothing here waits with a deadline: a rank that dies is noticed
by torchrun, which ends the others at once, and the ranks of a torchrun that dies end with it. A
rank that fails while its peers wait for it in a collective must die, not tidy up: taking a
communicator apart waits for the peers too.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from patternsearch.errors import EnvironmentLacks, InputError, PatternsearchError

__all__ = ["PeerError", "Team", "is_first_process", "joined", "world_size"]

_POLL_S = 0.02
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Of one collective inside a model copy; the slowest waits for a peer that still loads weights."""
_PR_SET_PDEATHSIG = 1
_UNIT = 1e3
"""Work is counted in thousands of multiply-adds, so that all of a run fits 63 bits."""


class PeerError(PatternsearchError):
    """Another rank of the run has stopped with an error, which it has reported itself."""

    def __init__(self, rank: int, message: str, exit_code: int) -> None:
        super().__init__(f"rank {rank} has stopped this run: {message}")
        self.rank = rank
        self.exit_code = exit_code


def world_size() -> int:
    """Return how many processes torchrun (or another launcher with its variables) started."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in names) else 1


def is_first_process() -> bool:
    """Return whether this process leads, before it has met the others."""
    return world_size() == 1 or int(os.environ["RANK"]) == 0


@dataclass(frozen=True, slots=True)
class Team:
    """This process among the processes of the run.

    Attributes:
        rank: of this process in the run.
        size: processes of the run.
        tp_size: tensor-parallel ranks of one copy of the model.
        local_rank: of this process on its machine: its GPU.
        store: where the processes meet; None for a process alone.
    """

    rank: int = 0
    size: int = 1
    tp_size: int = 1
    local_rank: int = 0
    store: Any = None

    @property
    def is_leader(self) -> bool:
        """Whether this process makes the decisions and writes all but the parts of others."""
        return self.rank == 0

    @property
    def num_copies(self) -> int:
        """Copies of the model; each takes a share of the samples."""
        return self.size // self.tp_size

    @property
    def copy(self) -> int:
        """Number of the copy that this process belongs to."""
        return self.rank // self.tp_size

    @property
    def writes(self) -> bool:
        """Whether this process writes the scores of its copy."""
        return self.rank % self.tp_size == 0

    def device(self, asked: str) -> str:
        """Return the device of this process.

        Raises:
            InputError: the device names one GPU, or all, for several processes.
        """
        if self.size == 1 or asked == "cpu":
            return asked
        if asked != "cuda":
            raise InputError(
                f"--device {asked} cannot be shared by {self.size} processes, each of which takes "
                "the GPU of its local rank: pass --device cuda, or start one process"
            )
        return f"cuda:{self.local_rank}"

    def share(self, name: str, document: Any = None) -> Any:
        """Give the leader's JSON document to everybody: the leader passes it, the others get it.

        Raises:
            PeerError: the leader stopped before it came to this.
        """
        if self.store is None:
            return document
        if self.is_leader:
            self.store.set(name, json.dumps(document))
            return document
        while not self.store.check([name]):
            self.check()
            time.sleep(_POLL_S)
        return json.loads(self.store.get(name))

    def advance(self, work: float, tokens: int) -> None:
        """Count work done by this process's copy of the model, for :meth:`done`."""
        if self.store is not None and self.writes:
            self.store.add("work", round(work / _UNIT))
            self.store.add("tokens", tokens)

    def done(self) -> tuple[float, int]:
        """Return the work and the tokens that all copies have counted."""
        return self.store.add("work", 0) * _UNIT, self.store.add("tokens", 0)

    def finish(self, report: dict[str, Any]) -> None:
        """Say that this process has done its share, with a JSON report for :meth:`reports`."""
        if self.store is not None:
            self.store.set(f"report{self.rank}", json.dumps(report))
            self.store.add("finished", 1)

    def reports(self) -> list[dict[str, Any]]:
        """Return the report of every process, by rank, after :meth:`wait`; none if alone."""
        if self.store is None:
            return []
        return [json.loads(self.store.get(f"report{rank}")) for rank in range(self.size)]

    def num_unfinished(self) -> int:
        """Return how many processes are still at work."""
        return 0 if self.store is None else self.size - self.store.add("finished", 0)

    def wait(self, meanwhile: Callable[[int], None]) -> None:
        """Wait until everybody has finished; ``meanwhile`` hears how many have not.

        Raises:
            PeerError: one of them stopped with an error.
        """
        while num_unfinished := self.num_unfinished():
            self.check()
            meanwhile(num_unfinished)
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raise :class:`PeerError` if another process has stopped with an error."""
        if self.store is not None and self.store.check(["stopped"]):
            stopped = json.loads(self.store.get("stopped"))
            if stopped["rank"] != self.rank:
                raise PeerError(**stopped)

    def stop(self, error: BaseException) -> None:
        """Tell the others that this process stops; the first word counts."""
        if self.store is None or isinstance(error, PeerError):
            return
        is_ours = isinstance(error, PatternsearchError)
        stopped = {
            "rank": self.rank,
            "message": str(error) if is_ours else type(error).__name__,
            "exit_code": error.exit_code if isinstance(error, PatternsearchError) else 1,
        }
        with suppress(Exception):  # the store may be what broke
            self.store.compare_set("stopped", "", json.dumps(stopped))


@contextmanager
def joined(tp_size: int, device: str) -> Iterator[Team]:
    """Meet the other processes of the run, and part from them at the end.

    Args:
        tp_size: tensor-parallel ranks of one copy of the model.
        device: torch device asked for; its type decides the backend. On ``cuda`` each process
            makes the GPU of its local rank its current one.

    Raises:
        InputError: the processes cannot be divided into copies of that many ranks.
        EnvironmentLacks: the others could not be reached, the store was lost, or this process has
            no GPU of its own.
    """
    size = world_size()
    if size % tp_size or tp_size < 1:
        raise InputError(
            f"--tp-ranks {tp_size} needs a multiple of {tp_size} processes, there "
            f"{'is' if size == 1 else 'are'} {size}: start them with "
            f"torchrun --nproc-per-node {tp_size} -m patternsearch calibrate"
        )
    if size == 1:
        yield Team()
        return
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(minutes=10)))
    except (RuntimeError, ValueError) as error:
        raise EnvironmentLacks(
            f"the processes of this run cannot meet at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} ({error}): start them with torchrun"
        ) from None
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        _end_with_launcher()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    team = Team(rank, size, tp_size, local_rank, PrefixStore("patternsearch", store))
    try:
        if device == "cuda":
            _take_gpu(team)
        with _model_copy(team, store, device):
            yield team
    except PeerError:
        raise
    except BaseException as error:
        if not team.is_leader and isinstance(error, PatternsearchError):
            team.check()  # the leader may have met the same fault, and said so
        team.stop(error)
        raise


def _end_with_launcher() -> None:
    """Ask the kernel to end this process when torchrun dies.

    Nobody would be left to end a rank that waits in a collective for one that has failed.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _take_gpu(team: Team) -> None:
    """Make the GPU of this process's local rank its current one, for whatever names none."""
    import torch

    count = torch.cuda.device_count()
    if team.local_rank >= count:
        raise EnvironmentLacks(
            f"local rank {team.local_rank} has no GPU of its own, this machine has {count}: start "
            "as many processes a machine as it has GPUs"
        )
    torch.cuda.set_device(team.local_rank)


@contextmanager
def _model_copy(team: Team, store: Any, device: str) -> Iterator[None]:
    """Make the ranks of one copy of the model a torch.distributed world of their own."""
    if team.tp_size == 1:
        yield
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    is_cuda = device.startswith("cuda")
    if torch.cuda.is_available() and not is_cuda:
        raise InputError(
            f"--device {device} with tensor-parallel ranks: transformers puts these on the GPUs "
            "where there are some: pass --device cuda"
        )
    dist.init_process_group(
        backend="nccl" if is_cuda else "gloo",
        store=PrefixStore(f"patternsearch/copy{team.copy}", store),
        rank=team.rank % team.tp_size,
        world_size=team.tp_size,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=torch.device("cuda", team.local_rank) if is_cuda else None,
    )
    try:
        yield
    except BaseException:
        # A peer may be inside a collective that this rank will never join; NCCL's orderly end
        # would wait for it for ever.
        with suppress(Exception):
            _abandon(dist)
        raise
    with suppress(RuntimeError):
        dist.destroy_process_group()


def _abandon(dist: Any) -> None:
    """End the communicators of this process without its peers."""
    if dist.get_backend() == "nccl":
        dist.group.WORLD.abort()
    else:
        dist.destroy_process_group()
