# SPDX-License-Identifier: Apache-2.0
"""Build step: copy the data folders at the top of the repository into the package.

Everything else about the build is in pyproject.toml.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

DATA_FOLDERS = ("configs", "calib")


class BuildWithData(build_py):
    """Builds the package with ``configs/`` and ``calib/`` under ``patternsearch/_data``."""

    def _data_files(self):
        target = Path(self.build_lib) / "patternsearch" / "_data"
        for folder in DATA_FOLDERS:
            for source in sorted(Path(folder).rglob("*")):
                if source.is_file():
                    yield source, target / source

    def run(self):
        """Build the package, then copy the data; an editable install reads the checkout's."""
        super().run()
        if not self.editable_mode:
            for source, target in self._data_files():
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))

    def get_outputs(self, include_bytecode=True):
        """List the copied data too, so that installers know of it."""
        outputs = super().get_outputs(include_bytecode)
        if not self.editable_mode:
            outputs += [str(target) for _, target in self._data_files()]
        return outputs


setup(cmdclass={"build_py": BuildWithData})
