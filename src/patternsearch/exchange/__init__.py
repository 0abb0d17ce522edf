# SPDX-License-Identifier: Apache-2.0
"""Other tools' files: import, export, and what changed between two configs."""
