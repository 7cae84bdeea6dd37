"""Fourier transforms: linear, and whole along the dims that they transform.

Other dims may not have empty shards: MKL refuses an empty batch.
"""

from __future__ import annotations

from sbp_core.signatures import along, linear

_RULE = along(1, "dim", linear(0), why="each coefficient is a sum over all elements", nonempty=True)

RULES = dict.fromkeys(
    ("aten._fft_c2c.default", "aten._fft_c2r.default", "aten._fft_r2c.default"), _RULE
)
