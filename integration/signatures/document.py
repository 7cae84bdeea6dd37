"""The page `docs/reference/signatures.md`: every operator, its notation, and its signatures.

    python -m signatures.document

It is made from `canonical.json` and the rules; a test checks that it is up to date.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# This lets `python integration/signatures/document.py` find the package, too.
sys.path.insert(0, str(Path(__file__).parent.parent))

from sbp_aten.rules import FAMILIES
from sbp_core.graph import Argument, Ref, Symbol, TensorType
from sbp_core.sbp import NdSbp
from sbp_core.signatures import OpCall, Signature1d, derivation, derive, installed_rules
from signatures.canonical import read

FILE = Path(__file__).parent.parent.parent / "docs" / "reference" / "signatures.md"

AXIS_SIZE = 2

#: The greatest number of signatures shown per operator; lists of tensors have many.
MOST_SHOWN = 16

_HEAD = """# Signatures

How every operator may be split along one mesh axis. Generated from the rules by
`python -m signatures.document` (in `integration/`); a test holds this file to them.

- *notation*: what the operator means; `sbp_core.signatures.notation` describes the language. It may
  depend on the arguments, so it is shown for the sample call beside it. `!` marks a label that may
  not be split, `+` one whose shards may not be empty; `why` says why.
- *signatures*: what follows from the notation on an axis of {axis_size} ranks: one SBP for each
  tensor argument, then for each output. All are *derived*, and verified by execution over PyTorch's
  own operator samples (`nox -s exhaustive -- signatures`). Those of operators that nobody describes
  can be *discovered* by execution, and say so (`sbp_torch.signatures.discovery`); none stand here.
- For your own call: `python -m sbp_torch.signatures aten.mm.default 4096x1024 1024x4096`.

{num_ops} operators, {num_useful} of which may be split; the others say why not.
"""


def document() -> str:
    """Return the text of the document."""
    by_family: dict[str, list[OpCall]] = defaultdict(list)
    places = _families()
    calls = list(read())
    for call in calls:
        by_family[places.get(call.op, "pointwise")].append(call)
    useful = sum(len(derive(call, AXIS_SIZE)) > 1 for call in calls)
    parts = [_HEAD.format(axis_size=AXIS_SIZE, num_ops=len(calls), num_useful=useful)]
    for family in sorted(by_family):
        parts.append(f"## {family.replace('_', ' ')}\n\n{_about(family)}\n")
        parts.append("| operator | sample | notation | signatures |\n|---|---|---|---|")
        parts += [_row(call) for call in sorted(by_family[family], key=lambda call: call.op)]
        parts.append("")
    parts += ["## described, without a sample\n", _unsampled({call.op for call in calls}), ""]
    return "\n".join(parts)


def _unsampled(shown: set[str]) -> str:
    """Return the operators with rules that no sample of PyTorch calls on a CPU, by family."""
    rest = {op: family for op, family in _families().items() if op not in shown}
    lines = [
        f"- {family.replace('_', ' ')}: "
        + ", ".join(f"`{op}`" for op in sorted(rest) if rest[op] == family)
        for family in sorted(set(rest.values()))
    ]
    head = "Their rules are run on hand-made calls by the tests of their family, where a CPU can.\n"
    return "\n".join([head, *lines])


def _families() -> dict[str, str]:
    """Return the module with the rule of each operator."""
    own = {
        op: "sbp_ops" for op in installed_rules().ops if op.startswith("sbp.")
    }  # the core's, too
    return own | {op: name for name, family in FAMILIES.items() for op in family.RULES}


def _about(family: str) -> str:
    """Return the first paragraph of a family's docstring."""
    text = FAMILIES[family].__doc__ or ""
    return text.split("\n\n")[0].replace("\n", " ")


def _row(call: OpCall) -> str:
    found = derive(call, AXIS_SIZE)
    shown = [f"`{_signature(part)}`" for part in found[:MOST_SHOWN]]
    if len(found) > MOST_SHOWN:
        shown.append(f"and {len(found) - MOST_SHOWN} more")
    notation = str(derivation(call, installed_rules()).notation)
    cells = (f"`{call.op}`", f"`{_sample(call)}`", f"`{notation}`", "<br>".join(shown))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _signature(part: Signature1d) -> str:
    mark = " (discovered)" if part.origin == "discovered" else ""
    return f"{NdSbp(*part.inputs)} → {NdSbp(*part.outputs)}{mark}".strip()


def _sample(call: OpCall) -> str:
    types = dict(zip(call.tensor_names, call.inputs, strict=True))
    words = [_text(entry, types) for entry in call.args]
    words += [f"{key}={_text(entry, types)}" for key, entry in call.kwargs.items()]
    return f"({', '.join(words)})"


def _text(argument: Argument, types: dict[str, TensorType]) -> str:
    if isinstance(argument, Ref):
        entry = types[argument.name]
        dtype = "" if entry.dtype == "float32" else f":{entry.dtype}"
        return ("x".join(map(str, entry.shape)) or "()") + dtype
    if isinstance(argument, Symbol):
        return argument.name
    if isinstance(argument, tuple):
        return f"[{', '.join(_texts(argument, types))}]"
    return repr(argument)


def _texts(arguments: tuple[Argument, ...], types: dict[str, TensorType]) -> Iterator[str]:
    return (_text(part, types) for part in arguments)


def main() -> None:
    """Write the document."""
    FILE.write_text(document(), "utf-8")
    sys.stdout.write(f"{FILE.name}: {len(FILE.read_text('utf-8').splitlines())} lines\n")


if __name__ == "__main__":
    main()
