"""`sbp-checkpoint diff`: compare names, shapes, dtypes, values and settings of two checkpoints."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sbp_core.serialize import dump
from sbp_launch.checkpoint.command.inspect import print_json
from sbp_launch.checkpoint.cover import split_into_blocks
from sbp_launch.checkpoint.manifest import Metadata
from sbp_launch.checkpoint.names import model_names, parse_renames, rename
from sbp_launch.checkpoint.places import FORMAT, FoundTensors, look, manifest_of, open_tensors
from sbp_launch.console import make_console, reading, say, show_table
from sbp_launch.exit_codes import FAILED

if TYPE_CHECKING:
    from torch import Tensor

    from sbp_launch.checkpoint.tensors import LazyTensors

#: Largest number of tensors that are printed: those that differ most.
_MOST_ROWS = 40

#: Measured times in the metadata; they differ between any two runs, so they are not compared.
_MEASURED = ("trainer.train_s",)

#: Number of elements that are compared at a time, as float64.
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """How much the values of a tensor differ.

    Args:
        largest: Largest absolute difference; infinite if an element is NaN in one tensor only.
        relative: `largest` divided by the largest magnitude in the second tensor.
        differing: Fraction of the elements that differ.
    """

    largest: float
    relative: float
    differing: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifferences:
    """Differences between two sets of tensors.

    Args:
        only_one, only_other: Names that only one set has.
        common: Number of names that both sets have.
        forms: Dtype and shape in both sets, for tensors in which these differ.
        values: Differences of values, for tensors of equal shape that differ.
    """

    only_one: tuple[str, ...]
    only_other: tuple[str, ...]
    common: int
    forms: Mapping[str, tuple[str, str]]
    values: Mapping[str, Deviation]

    @property
    def equal(self) -> int:
        """Number of equal tensors."""
        return self.common - len(self.forms.keys() | self.values.keys())

    @property
    def differs(self) -> bool:
        """Whether there is any difference."""
        return bool(self.only_one or self.only_other or self.equal < self.common)

    def as_json(self, settings: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
        """Return the output of `--json`."""
        return {
            "differs": self.differs or bool(settings),
            "equal_tensors": self.equal,
            "only_in_one": list(self.only_one),
            "only_in_other": list(self.only_other),
            "forms": {name: list(pair) for name, pair in self.forms.items()},
            "deviations": {
                # JSON has no infinity.
                name: {k: v if math.isfinite(v) else str(v) for k, v in asdict(found).items()}
                for name, found in self.values.items()
            },
            "settings": {key: list(pair) for key, pair in settings.items()},
        }


def diff(options: Namespace) -> int:
    """Compare the tensors at two paths. Return the exit code: 1 if they differ."""
    renames = parse_renames(options.rename)
    # Imported here: `look` needs no torch.
    from sbp_launch.checkpoint.tensors import Chosen, size_bytes

    one, other = look(options.one), look(options.other)
    with open_tensors(one) as firsts, open_tensors(other) as seconds:
        names = {name: name for name in _compared_names(firsts, options)}
        own = Chosen(firsts, rename(names, renames))
        with reading("comparing", sum(size_bytes(own.like(name)) for name in own)) as tell:
            others = Chosen(seconds, {name: name for name in _compared_names(seconds, options)})
            result = compare(Chosen(firsts, own.sources, tell), others)
    settings = _settings(one, other)
    if options.json:
        print_json({"one": one.place, "other": other.place, **result.as_json(settings)})
    else:
        _show(make_console(), one, other, result, settings)
    return FAILED if result.differs or settings else 0


def compare(ones: LazyTensors, others: LazyTensors) -> TensorDifferences:
    """Compare tensors with the same names, in parts of at most 64 MiB."""
    from sbp_launch.checkpoint.tensors import PART_BYTES, dtype_name

    forms: dict[str, tuple[str, str]] = {}
    values: dict[str, Deviation] = {}
    common = [name for name in ones if name in others]
    for name in common:
        likes = ones.like(name), others.like(name)
        one, other = (f"{dtype_name(like)} {list(like.shape)}" for like in likes)
        if one != other:
            forms[name] = one, other
        if likes[0].shape == likes[1].shape:
            item_bytes = max(like.element_size() for like in likes)
            blocks = split_into_blocks(likes[0].shape, item_bytes, PART_BYTES)
            found = deviation((ones.part(name, at), others.part(name, at)) for at in blocks)
            if found.differing:
                values[name] = found
    return TensorDifferences(
        only_one=tuple(name for name in ones if name not in others),
        only_other=tuple(name for name in others if name not in ones),
        common=len(common),
        forms=forms,
        values=values,
    )


def deviation(parts: Iterable[tuple[Tensor, Tensor]]) -> Deviation:
    """Compare two tensors of equal shape, given as pairs of parts; NaN equals NaN."""
    import torch

    largest = scale = 0.0
    differing = count = 0
    for one, other in parts:
        firsts, seconds = one.reshape(-1), other.reshape(-1)
        count += firsts.numel()
        is_complex = firsts.is_complex() or seconds.is_complex()
        are_integers = not (is_complex or firsts.is_floating_point() or seconds.is_floating_point())
        exact = torch.complex128 if is_complex else torch.float64
        for at in range(0, firsts.numel(), _BLOCK):
            a, b = firsts[at : at + _BLOCK].to(exact), seconds[at : at + _BLOCK].to(exact)
            unequal = (a != b) & ~(a.isnan() & b.isnan())
            if are_integers:  # float64 represents them exactly only below 2**53
                unequal = firsts[at : at + _BLOCK].long() != seconds[at : at + _BLOCK].long()
            scale = max(scale, b.abs().nan_to_num(0.0, 0.0, 0.0).max().item())
            if unequal.any():
                differing += int(unequal.sum())
                found = (a[unequal] - b[unequal]).abs().nan_to_num(math.inf, math.inf, math.inf)
                largest = max(largest, found.max().item(), float(are_integers))
    return Deviation(
        largest=largest,
        relative=largest / scale if scale else (math.inf if largest else 0.0),
        differing=differing / max(1, count),
    )


def _compared_names(tensors: LazyTensors, options: Namespace) -> list[str]:
    return list(tensors) if options.all else model_names(tensors)


def _settings(one: FoundTensors, other: FoundTensors) -> dict[str, tuple[Any, Any]]:
    """Return the differences between the manifests of two checkpoints, by key."""
    if {one.format, other.format} != {FORMAT}:
        return {}
    flat = [dict(_flat(dump(manifest_of(found).metadata, Metadata))) for found in (one, other)]
    keys = [*flat[0], *(key for key in flat[1] if key not in flat[0])]
    pairs = {key: (flat[0].get(key), flat[1].get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1] and key not in _MEASURED}


def _flat(value: Any, before: str = "") -> list[tuple[str, Any]]:
    """Flatten nested mappings: return pairs of a dotted path and a value."""
    if not isinstance(value, Mapping):
        return [(before, value)]
    return [
        pair
        for key, part in value.items()
        for pair in _flat(part, f"{before}.{key}" if before else str(key))
    ]


def _show(
    console: Console,
    one: FoundTensors,
    other: FoundTensors,
    result: TensorDifferences,
    settings: Mapping[str, tuple[Any, Any]],
) -> None:
    say(console, [f"one: {one.place}", f"other: {other.place}"])
    for title, names in (("only in one", result.only_one), ("only in other", result.only_other)):
        if names:
            more = f", and {len(names) - 8:,} more" if len(names) > 8 else ""
            say(console, [f"{title}: {', '.join(names[:8])}{more}"])
    if settings:
        console.print()
        rows = [(key, *map(json.dumps, pair)) for key, pair in settings.items()]
        show_table(console, ("setting", "one", "other"), rows)
    if result.forms:
        console.print()
        rows = [(name, *pair) for name, pair in result.forms.items()]
        show_table(console, ("tensor", "one", "other"), rows)
    if result.values:
        console.print()
        order = sorted(result.values.items(), key=lambda pair: -pair[1].relative)
        show_table(
            console,
            ("tensor", "largest deviation", "relative", "differing"),
            (
                (name, f"{at.largest:.3g}", f"{at.relative:.3g}", f"{at.differing:.1%}")
                for name, at in order[:_MOST_ROWS]
            ),
            ("largest deviation", "relative", "differing"),
        )
        if len(order) > _MOST_ROWS:
            say(console, [f"and {len(order) - _MOST_ROWS:,} more, which --json lists"])
    console.print()
    say(console, [f"equal: {result.equal:,} of the {result.common:,} tensors that both have"])
