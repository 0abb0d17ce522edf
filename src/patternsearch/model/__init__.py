# SPDX-License-Identifier: Apache-2.0
"""Loading, identity, capture and fingerprints of the model a config is bound to."""
