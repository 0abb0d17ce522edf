# SPDX-License-Identifier: Apache-2.0
"""One pass over a layer's attention scores every candidate of a grid."""
