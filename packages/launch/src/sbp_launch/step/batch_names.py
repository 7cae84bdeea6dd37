"""Check that a batch is the same kind of container as the example batch of a step."""

from __future__ import annotations

from collections.abc import Collection

from sbp_core.errors import SbpValueError


def check_batch_names(given: Collection[str], example: Collection[str]) -> None:
    """Check that a batch and the example are both mappings, both sequences, or both tensors.

    Missing or additional names are left to the session, whose error names them.

    Args:
        given: Names of the tensors of the batch, as `flatten_batch` returns them.
        example: Names of the tensors of the example.

    Raises:
        SbpValueError: the batch is another kind of container.
    """
    if given and example and _kind(given) != _kind(example):
        raise SbpValueError(
            f"the batch is {_describe(given)}, and the example was {_describe(example)}",
            where="batch",
            accepted=_describe(example),
            todo="pass a batch of that form; or give parallelize an example of this "
            "form, and a loss that reads it",
        )


def _kind(names: Collection[str]) -> str:
    if set(names) == {"batch"}:
        return "tensor"
    return "sequence" if all(_first(name).isdecimal() for name in names) else "mapping"


def _describe(names: Collection[str]) -> str:
    kind, firsts = _kind(names), dict.fromkeys(map(_first, names))
    if kind == "tensor":
        return "one tensor"
    if kind == "sequence":
        return f"a tuple or list of {len(firsts)}"
    return f"a mapping with {', '.join(map(repr, firsts))}"


def _first(name: str) -> str:
    return name.partition(".")[0]
