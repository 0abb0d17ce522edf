# SPDX-License-Identifier: Apache-2.0
"""Run a config inside a transformers model: attach, count what ran how, watch it in production."""
