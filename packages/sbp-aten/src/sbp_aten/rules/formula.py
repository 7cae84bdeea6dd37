"""Parse the text of a sharding rule, such as `v d, i* => i* d`, for tensors of any number of dims.

The modules of sharding rules in this folder use it; it holds no rules itself.

    v d, i* => i* d              `i*` is a run `i0 i1 ..`, of as many dims as the tensor has left
    ... p m, ... r m => ... p r  `...` are leading dims `d0 d1 ..` that are broadcast

Marks after a run apply to all its labels, and a clause with a run (`reduce v* max`) stands for one
clause for each label; `why` is left out if nothing is marked. The rest is as in
`sbp_core.signatures.notation`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from sbp_core.signatures import Localizer, Notation, OpCall, Rule, broadcast_dims, broadcast_shape

_RUN = re.compile(r"([A-Za-z_]\w*)\*([!+]*)")
_DIM = re.compile(r"\([^()]+\)|[^\s()]+")
_BETWEEN = re.compile(r"(,|(?<=\s)\+(?=\s)|[-=]>)")


def notation(call: OpCall, text: str, **lengths: int) -> Notation:
    """Return the notation of a call for a text with runs.

    Args:
        call: The call; its shapes determine the lengths of runs.
        text: The text. If a tensor has several runs, all but one are in an earlier tensor, or in
            `lengths`.
        **lengths: Numbers of dims of runs.
    """
    # A reason may contain any characters.
    text, _, why = text.partition("; why ")
    formula, *clauses = text.split(";")
    # Tensors are at even places, their separators (`,`, ` + ` or an arrow) at odd ones.
    parts = _BETWEEN.split(formula)
    places = range(0 if call.inputs else 2, len(parts), 2)
    shapes = [entry.shape for entry in (*call.inputs, *call.outputs)]
    shapes += [()] * (len(places) - len(shapes))
    leading: dict[int, tuple[int, ...]] = {}
    for at, shape in zip(places, shapes, strict=False):
        for name, _ in _RUN.findall(parts[at]):
            lengths.setdefault(name, len(shape) - _num_dims(parts[at], lengths))
        leading[at] = shape[: len(shape) - _num_dims(parts[at], lengths)]
    wide = broadcast_shape([shape for at, shape in leading.items() if "..." in parts[at]])
    for at in places:
        if "..." in parts[at]:
            dims = ("".join(dim) or "1" for dim in broadcast_dims(leading[at], wide))
            parts[at] = parts[at].replace("...", " ".join(dims))
        parts[at] = _RUN.sub(lambda run: " ".join(_labels(run, lengths)), parts[at]).strip() or "()"
    for clause in clauses:
        run = _RUN.search(clause)
        parts += (
            [f";{clause}"]
            if run is None
            else [f";{clause.replace(run[0], name)}" for name in _labels(run, lengths)]
        )
    found = _parsed(" ".join(parts))
    return replace(found, why=why) if why and (found.whole or found.nonempty) else found


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Notation:
    return Notation.parse(text)


def _num_dims(tensor: str, lengths: Mapping[str, int]) -> int:
    """Return the number of dims of a tensor without runs of unknown length and `...`."""
    dims = [dim for dim in _DIM.findall(tensor) if dim != "..."]
    runs = [_RUN.fullmatch(dim) for dim in dims]
    return sum(1 if run is None else lengths.get(run[1], 0) for run in runs)


def _labels(run: re.Match[str], lengths: Mapping[str, int]) -> list[str]:
    return [f"{run[1]}{index}{run[2]}" for index in range(lengths.get(run[1], 0))]


def stated(text: str, localize: Localizer | None = None) -> Rule:
    """Return the rule of an operator with one text with runs as its notation."""
    return Rule(lambda call: notation(call, text), localize)


def by_operator(rules: Mapping[str, Rule], namespace: str = "aten") -> dict[str, Rule]:
    """Return rules by operator, given rules by lists of names; `mm` means `aten.mm.default`."""
    return {
        f"{namespace}.{op}" if "." in op else f"{namespace}.{op}.default": rule
        for ops, rule in rules.items()
        for op in ops.split()
    }
