# SPDX-License-Identifier: Apache-2.0
"""``python -m patternsearch`` is the console script, for launchers such as torchrun."""

from patternsearch.cli.app import main

main()
