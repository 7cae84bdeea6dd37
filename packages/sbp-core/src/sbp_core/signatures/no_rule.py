"""The rule of last resort: an operator of unknown meaning runs whole on every rank."""

from __future__ import annotations

from sbp_core.signatures.patterns import opaque

OPAQUE = opaque("the meaning of the operator is not known")
