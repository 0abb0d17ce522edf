# SPDX-License-Identifier: Apache-2.0
"""The command line: one small module per command; the only place for Typer and Rich."""
