"""One call of every operator, for `docs/reference/signatures.md`, chosen from the recorded ones.

    python -m signatures.canonical --calls FILE

writes `canonical.json` next to this module: operators, arguments, shapes and dtypes, without data.
So the document can be made and checked without running operators.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

# This lets `python integration/signatures/canonical.py` find the package, too.
sys.path.insert(0, str(Path(__file__).parent.parent))

from sbp_core.graph import Argument, TensorType
from sbp_core.serialize import dump, load
from sbp_core.signatures import OpCall, derive
from sbp_torch.signatures import call_of
from signatures.store import Calls

FILE = Path(__file__).parent / "canonical.json"

#: The greatest number of elements of a readable example.
MOST_ELEMENTS = 5000


def read(file: Path = FILE) -> Iterator[OpCall]:
    """Yield the stored calls, by operator."""
    for op, value in json.loads(file.read_text("utf-8")).items():
        yield OpCall(
            op=op,
            args=load(value["args"], tuple[Argument, ...]),
            kwargs=load(value["kwargs"], dict[str, Argument]),
            inputs=tuple(TensorType(tuple(shape), dtype) for dtype, shape in value["inputs"]),
            tensor_names=tuple(f"input{index}" for index in range(len(value["inputs"]))),
            outputs=tuple(TensorType(tuple(shape), dtype) for dtype, shape in value["outputs"]),
            tags=tuple(value["tags"]),
            where=(f"op {op}",),
        )


def _json(call: OpCall) -> dict[str, Any]:
    return {
        "args": dump(call.args, tuple[Argument, ...]),
        "kwargs": dump(dict(call.kwargs), dict[str, Argument]),
        "inputs": [[entry.dtype, list(entry.shape)] for entry in call.inputs],
        "outputs": [[entry.dtype, list(entry.shape)] for entry in call.outputs],
        "tags": list(call.tags),
    }


def chosen(calls: Sequence[OpCall]) -> OpCall | None:
    """Return the best example: many signatures, reals, no empty tensors, then the smallest.

    Return None if no call has a rule.
    """

    def rank(call: OpCall) -> tuple[Any, ...]:
        types = (*call.inputs, *call.outputs)
        elements = sum(prod(entry.shape) for entry in types)
        plain = call.inputs[0].dtype == "float32" if call.inputs else True
        empty = any(0 in entry.shape for entry in types)
        useful = min(len(derive(call, 2)), 8)
        return (
            empty,
            elements > MOST_ELEMENTS,
            not plain,
            -useful,
            len(types),
            elements,
            repr(call),
        )

    ruled = []
    for call in calls:
        try:
            derive(call, 2)
        except Exception:  # no rule, or none that fits: nothing to show
            continue
        ruled.append(call)
    return min(ruled, key=rank, default=None)


def main(argv: Sequence[str] | None = None) -> None:
    """Choose and write."""
    parser = argparse.ArgumentParser(prog="signatures.canonical", description=__doc__)
    parser.add_argument("--calls", type=Path, required=True, help="file of recorded calls")
    options = parser.parse_args(argv)
    calls = Calls(options.calls)
    found: dict[str, dict[str, Any]] = {}
    for op in calls.ops:
        opcalls = []
        for recorded, _ in calls.of(op):
            try:
                opcalls.append(call_of(recorded.op, recorded.args, recorded.kwargs)[0])
            except (RuntimeError, ValueError, TypeError, IndexError):
                continue
        call = chosen(opcalls)
        if call is not None:
            found[op] = _json(call)
    lines = [f"{json.dumps(op)}: {json.dumps(found[op])}" for op in sorted(found)]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    sys.stdout.write(f"{len(found)} operators in {FILE.name}\n")


if __name__ == "__main__":
    main()
