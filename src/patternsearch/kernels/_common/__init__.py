# SPDX-License-Identifier: Apache-2.0
"""What the kernel launchers share."""
