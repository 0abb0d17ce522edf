# SPDX-License-Identifier: Apache-2.0
"""The version, alone in its file so that packaging and start-up read it cheaply."""

__version__ = "0.1.0"
