# SPDX-License-Identifier: Apache-2.0
"""From scores to one pattern per head."""
