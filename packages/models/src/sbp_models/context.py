"""The error for texts that are longer than the context of a language model."""

from __future__ import annotations

from sbp_core.errors import SbpValueError


def too_long(time: int, context: int) -> SbpValueError:
    """Return the error for a text with more tokens than the model's context."""
    return SbpValueError(
        f"{time} tokens are more than the context of {context}",
        accepted=f"tokens of shape (batch, time <= {context})",
        todo="raise model.context, or lower data.context",
    )
