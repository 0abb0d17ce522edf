# SPDX-License-Identifier: Apache-2.0
"""How a GPU was measured to run fastest: execution choices that a table hands to the runtime.

They never change which pairs are read, so they are no part of a config.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from patternsearch.errors import TimingError
from patternsearch.kernels.attend.configs import AttendConfig, LaunchClass, LaunchTuning
from patternsearch.timing.table import LaunchSetting, TimingRow, TimingTable
from patternsearch.timing.workload import dense_backends

__all__ = ["OWN_DENSE", "Execution", "execution_on", "launch_tuning"]

OWN_DENSE = "triton"
"""The name under which the sparse kernel is measured on a list of every tile."""


def launch_tuning(settings: Iterable[LaunchSetting]) -> LaunchTuning:
    """Return the settings that are used, by class of launches.

    Raises:
        TimingError: a setting has values that this installation's kernels do not know.
    """
    tuning = {}
    for setting in settings:
        if not setting.is_used or setting.op != "attend" or setting.tile is None:
            continue
        shape = LaunchClass(setting.dtype, setting.head_dim, setting.tile, setting.has_columns)
        try:
            tuning[shape] = AttendConfig(**setting.values)  # type: ignore[arg-type]
        except TypeError as error:
            raise TimingError(
                f"the timing table has a launch setting that these kernels do not know ({error}): "
                "measure again with `patternsearch bench`"
            ) from None
    return tuning


@dataclass(frozen=True, slots=True)
class Execution:
    """Execution choices for one GPU.

    Attributes:
        tuning: how the sparse kernel is launched.
        rows: the table's dense rows of backends that are installed.
    """

    tuning: LaunchTuning
    rows: tuple[TimingRow, ...]

    def dense(self, dtype: str, head_dim: int, num_tokens: int) -> str | None:
        """Return the installed backend that was fastest at the nearest measured length, by name.

        None where nothing installed was measured for the shape.
        """
        mine = [row for row in self.rows if (row.dtype, row.head_dim) == (dtype, head_dim)]
        if not mine:
            return None
        nearest = min({row.num_tokens for row in mine}, key=lambda n: abs(n - num_tokens))
        at = (row for row in mine if row.num_tokens == nearest)
        return min(at, key=lambda row: row.p50_ms).backend


def execution_on(table: TimingTable, device: torch.device) -> Execution:
    """Return a table's execution choices for the GPU it was measured on.

    Raises:
        TimingError: the device is another GPU or none, or the table's kernels are not these.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    if name != table.device:
        raise TimingError(
            f"the timing table was measured on {table.device} and this model is on {name}: its "
            "launch settings belong to that GPU; run `patternsearch bench` here, or leave timings "
            "out"
        )
    table.require_these_kernels()
    installed = {OWN_DENSE}
    for backend in dense_backends(device):
        installed.add(backend.name)
        if backend.otherwise is not None:
            installed.add(backend.otherwise.name)
    dense = (row for row in table.rows if row.op == "dense" and row.backend in installed)
    return Execution(launch_tuning(table.settings), tuple(dense))
