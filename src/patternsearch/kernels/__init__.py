# SPDX-License-Identifier: Apache-2.0
"""The operations, each with its boring reference beside the fast path."""
