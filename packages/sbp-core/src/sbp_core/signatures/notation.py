"""`Notation`: the meaning of an operator, written like einsum; its sharding is derived from it.

    i k, k j -> i j              a sum of products, with the meaning of einsum
    j + i k, k j -> i j          a sum of several addends
    b d!, b d! => b d!; linear 0 some function along the labels; `d` is needed whole
    (b t) d -> b t d             a dim may be a group of labels; the first is the slowest
    b 1 => b c                   `1` is a dim of one element that is broadcast

The tensor arguments are left of the arrow, in argument order, the outputs right of it; `()` is a
tensor without dims. Marks after a label: `!` may not be split, `+` has to leave every shard at
least one element. A label that an output lacks is summed away there, unless a clause says
otherwise. Clauses follow, each after `;`:

    linear 0 1                   jointly linear in arguments 0 and 1 (`linear 0 to 1`: output 1
                                 depends linearly on it, the other outputs not at all)
    increasing 0, decreasing 0   monotone in the argument: each element of an output is a monotone
                                 function of one element of it (of all of them together, if several
                                 arguments stand here: of one element of one of them)
    max 0 1, min 0 1             maxima (minima) of all arguments give maxima (minima) of outputs
    falls 0                      it falls where it is defined, above some bound: minima of the
                                 argument give maxima (below a maximum it may not be defined)
    unread 0                     only the shape of the argument matters
    ignored 0                    not even its shape matters, where all else is whole
    free 0                       the argument may be split in any way, however all else is cut
    reduce k max                 `k` is reduced with max; `reduce k@1 min` for output 1 only;
                                 `reduce k@1 none`: output 1 does not depend on what `k` indexes
    beside k 0                   argument 0 counts once, whatever `k` indexes: where `k` is split it
                                 is partial (under a maximum or minimum of `k` it need not be)
    size g 2                     extent of `g`, where no shape determines it
    touch v 8                    at most 8 of the elements that `v` indexes are read or written
    flop 8                       work of the call, if it cannot be read off the labels
    why the softmax runs over d  why labels are marked `!` or `+`, for messages and listings; last

This module holds values and text. `signatures.derivations` derives signatures from a notation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from sbp_core.errors import SbpValueError
from sbp_core.sbp import REDUCTIONS

#: One dim: its labels, slowest first; no label means one element, broadcast.
Dim = tuple[str, ...]

#: The dims of one tensor.
Dims = tuple[Dim, ...]

_LABEL = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<marks>[!+]*)")
_TOKEN = re.compile(r"\(([^()]*)\)|(\S+)")


class Effect(StrEnum):
    """How outputs depend on an argument with the others fixed: linear, increasing, ..."""

    LINEAR = "linear"
    INCREASING = "increasing"
    DECREASING = "decreasing"
    MAX = "max"
    MIN = "min"
    FALLS = "falls"
    UNREAD = "unread"
    IGNORED = "ignored"
    FREE = "free"


#: How a label is reduced away: the reductions of partial values, or not at all.
LABEL_REDUCTIONS = (*REDUCTIONS, "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """One statement: outputs depend on some arguments in some way (`Effect`).

    Args:
        effect: The kind of dependence.
        inputs: Positions among the tensor arguments; a linear set is jointly linear.
        outputs: Outputs with this dependence, the others do not depend at all; None means all.
    """

    effect: Effect
    inputs: tuple[int, ...]
    outputs: tuple[int, ...] | None = None

    def __str__(self) -> str:
        words = [self.effect.value, *map(str, self.inputs)]
        if self.outputs is not None:
            words += ["to", *map(str, self.outputs)]
        return " ".join(words)


def linear(*inputs: int, outputs: tuple[int, ...] | None = None) -> Dependence:
    """Return the statement that outputs are jointly linear in these arguments."""
    return Dependence(effect=Effect.LINEAR, inputs=inputs, outputs=outputs)


def increasing(*inputs: int, outputs: tuple[int, ...] | None = None) -> Dependence:
    """Return the statement that elements of outputs grow with one element of these arguments."""
    return Dependence(effect=Effect.INCREASING, inputs=inputs, outputs=outputs)


def decreasing(*inputs: int, outputs: tuple[int, ...] | None = None) -> Dependence:
    """Return the statement that elements of outputs fall with one element of these arguments."""
    return Dependence(effect=Effect.DECREASING, inputs=inputs, outputs=outputs)


def maxima(*inputs: int, outputs: tuple[int, ...] | None = None) -> Dependence:
    """Return the statement that maxima of these arguments give the maxima of outputs."""
    return Dependence(effect=Effect.MAX, inputs=inputs, outputs=outputs)


def minima(*inputs: int, outputs: tuple[int, ...] | None = None) -> Dependence:
    """Return the statement that minima of these arguments give the minima of outputs."""
    return Dependence(effect=Effect.MIN, inputs=inputs, outputs=outputs)


def falls(*inputs: int, outputs: tuple[int, ...] | None = None) -> Dependence:
    """Return the statement that minima of these arguments together give maxima of outputs."""
    return Dependence(effect=Effect.FALLS, inputs=inputs, outputs=outputs)


def unread(argument: int) -> Dependence:
    """Return the statement that only the shape of the argument matters."""
    return Dependence(effect=Effect.UNREAD, inputs=(argument,))


def ignored(argument: int) -> Dependence:
    """Return the statement that the argument has no influence: any entry of it is legal."""
    return Dependence(effect=Effect.IGNORED, inputs=(argument,))


def free(argument: int) -> Dependence:
    """Return the statement that the argument may be split in any way, however all else is cut."""
    return Dependence(effect=Effect.FREE, inputs=(argument,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """The meaning of an operator, as far as signatures need it; see the module docstring.

    Args:
        inputs: Dims of each tensor argument.
        outputs: Dims of each output.
        addends: For a sum of products, the addend that each argument is a factor of; None if the
            operator is not a sum of products.
        dependences: Linearity and monotony beyond what a sum of products implies.
        whole: Labels that may not be split.
        nonempty: Labels whose shards may not be empty.
        reductions: `label` or `label@output` -> `sum`, `max`, `min` or `none`; `sum` by default.
        beside: Pairs (label, argument without it): the argument is one more term of the sum,
            maximum or minimum over the label.
        sizes: Extents of labels that the shapes do not determine, such as extents of groups.
        touched: Labels of which few elements are read or written, such as the rows of a table, with
            the largest number of them.
        work_flop: Work of the call in floating-point operations; None: computed from the labels.
        why: Why labels are in `whole` and `nonempty`; half a sentence.

    Raises:
        SbpValueError: a label repeats in one tensor, or a clause names a missing label or argument.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    addends: tuple[int, ...] | None = None
    dependences: tuple[Dependence, ...] = ()
    whole: frozenset[str] = frozenset()
    nonempty: frozenset[str] = frozenset()
    reductions: tuple[tuple[str, str], ...] = field(default=())
    beside: tuple[tuple[str, int], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    touched: tuple[tuple[str, int], ...] = ()
    work_flop: float | None = None
    why: str = ""

    def __post_init__(self) -> None:
        for dims in (*self.inputs, *self.outputs):
            names = [name for dim in dims for name in dim]
            if len(set(names)) != len(names):
                raise SbpValueError(
                    f"a label repeats in one tensor of {self}",
                    accepted="distinct labels in each tensor",
                )
        if self.addends is not None and (
            len(self.addends) != len(self.inputs) or len(self.outputs) != 1
        ):
            raise SbpValueError(
                f"{self} is no sum of products", accepted="one output, and an addend an argument"
            )
        known = set(self.labels)
        for key, reduction in self.reductions:
            if key.split("@")[0] not in known or reduction not in LABEL_REDUCTIONS:
                raise SbpValueError(
                    f"{self} cannot reduce {key!r} with {reduction!r}",
                    accepted=f"labels {', '.join(sorted(known))}; {', '.join(LABEL_REDUCTIONS)}",
                )
        for label, extent in self.sizes:
            if label not in known or extent < 1:
                raise SbpValueError(
                    f"{self} has no label {label!r} of extent {extent}",
                    accepted=f"labels {', '.join(sorted(known))}, extents from 1 on",
                )
        for label, count in self.touched:
            if label not in known or count < 0:
                raise SbpValueError(
                    f"{self} has no label {label!r} of which {count} are touched",
                    accepted=f"labels {', '.join(sorted(known))}, counts from 0 on",
                )
        for label, index in self.beside:
            if label not in known or not 0 <= index < len(self.inputs):
                raise SbpValueError(
                    f"{self} has no argument {index} for label {label!r}",
                    accepted=f"labels {', '.join(sorted(known))}; arguments below "
                    f"{len(self.inputs)}",
                )
        for dependence in self.dependences:
            self._check_dependence(dependence)

    def _check_dependence(self, dependence: Dependence) -> None:
        inputs_fit = all(0 <= index < len(self.inputs) for index in dependence.inputs)
        outputs = dependence.outputs or ()
        if not inputs_fit or not all(0 <= index < len(self.outputs) for index in outputs):
            raise SbpValueError(
                f"'{dependence}' names an argument or output that is not there",
                accepted=f"arguments below {len(self.inputs)}, outputs below {len(self.outputs)}",
            )

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels: first the outputs' labels, each once."""
        return tuple(
            dict.fromkeys(
                name for dims in (*self.outputs, *self.inputs) for dim in dims for name in dim
            )
        )

    def reduction(self, label: str, output: int) -> str:
        """Return how `label` is reduced away for one output."""
        table = dict(self.reductions)
        # A clause for one output goes before a clause for all.
        return table.get(f"{label}@{output}") or table.get(label) or "sum"

    @classmethod
    def parse(cls, text: str) -> Notation:
        """Parse the text form.

        Raises:
            SbpValueError: the text is not a notation.
        """
        formula, *clauses = text.split(";")
        # `->` promises a sum of products, which implies linearity; `=>` promises only the labels
        # and the clauses.
        arrow = "=>" if "=>" in formula else "->"
        sides = formula.split(arrow)
        if len(sides) != 2:
            raise _unreadable(text, f"one arrow in {formula.strip()!r}")
        reader = _Reader(text)
        # A ` + ` between tensors separates addends. In `h+`, a mark, there is no space before it.
        # Without arguments there are no addends: `-> i j` is the empty sum.
        addends = re.split(r"(?:^|\s)\+(?:\s|$)", sides[0]) if sides[0].strip() else []
        if arrow == "=>" and len(addends) > 1:
            raise _unreadable(text, "'->' for a sum of products")
        terms = [list(reader.tensors(addend)) for addend in addends]
        outputs = tuple(reader.tensors(sides[1]))
        for clause in clauses:
            reader.clause(clause)
        return cls(
            inputs=tuple(dims for term in terms for dims in term),
            outputs=outputs,
            addends=tuple(index for index, term in enumerate(terms) for _ in term)
            if arrow == "->"
            else None,
            dependences=tuple(reader.dependences),
            whole=frozenset(reader.whole),
            nonempty=frozenset(reader.nonempty),
            reductions=tuple(reader.reductions),
            beside=tuple(reader.beside),
            sizes=tuple(reader.sizes),
            touched=tuple(reader.touched),
            work_flop=reader.work_flop,
            why=reader.why,
        )

    def __str__(self) -> str:
        left: list[str] = []
        # Addends are runs of arguments, so `+` stands where the number changes.
        for index, dims in enumerate(self.inputs):
            if index:
                same = self.addends is None or self.addends[index] == self.addends[index - 1]
                left.append(", " if same else " + ")
            left.append(self._tensor(dims))
        arrow = "=>" if self.addends is None else "->"
        formula = f"{''.join(left)} {arrow} {', '.join(map(self._tensor, self.outputs))}"
        clauses = [
            *map(str, self.dependences),
            *(f"reduce {key} {reduction}" for key, reduction in self.reductions),
            *(f"beside {label} {index}" for label, index in self.beside),
            *(f"size {label} {extent}" for label, extent in self.sizes),
            *(f"touch {label} {count}" for label, count in self.touched),
        ]
        if self.work_flop is not None:
            clauses.append(f"flop {self.work_flop:.17g}")
        if self.why:
            clauses.append(f"why {self.why}")
        return "; ".join([formula.strip(), *clauses])

    def _tensor(self, dims: Dims) -> str:
        def label(name: str) -> str:
            return name + "!" * (name in self.whole) + "+" * (name in self.nonempty)

        def dim(labels: Dim) -> str:
            text = " ".join(map(label, labels))
            return text if len(labels) == 1 else f"({text})" if labels else "1"

        return " ".join(map(dim, dims)) or "()"


def _unreadable(text: str, accepted: str) -> SbpValueError:
    return SbpValueError(
        f"{text!r} is no notation",
        accepted=accepted,
        todo="see the docstring of sbp_core.signatures.notation",
    )


class _Reader:
    """Parses one text; collects the marks and clauses found on the way."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.whole: set[str] = set()
        self.nonempty: set[str] = set()
        self.dependences: list[Dependence] = []
        self.reductions: list[tuple[str, str]] = []
        self.beside: list[tuple[str, int]] = []
        self.sizes: list[tuple[str, int]] = []
        self.touched: list[tuple[str, int]] = []
        self.work_flop: float | None = None
        self.why = ""

    def tensors(self, text: str) -> Iterator[Dims]:
        """Yield the dims of each tensor of a comma-separated list."""
        for tensor in text.split(","):
            if tensor.strip() in ("", "()"):
                yield ()
            else:
                yield tuple(self._dim(*match.groups()) for match in _TOKEN.finditer(tensor))

    def _dim(self, group: str | None, word: str | None) -> Dim:
        if word == "1":
            return ()
        return tuple(map(self._label, (group if group is not None else word or "").split()))

    def _label(self, word: str) -> str:
        match = _LABEL.fullmatch(word)
        if match is None:
            raise _unreadable(self.text, f"a label such as b, d! or h+ instead of {word!r}")
        if "!" in match["marks"]:
            self.whole.add(match["name"])
        if "+" in match["marks"]:
            self.nonempty.add(match["name"])
        return match["name"]

    def clause(self, text: str) -> None:
        """Read one clause."""
        try:
            self._clause(text.split())
        except ValueError as error:
            effects = ", ".join(Effect)
            accepted = f"{effects}, reduce, flop or why, not {text!r}"
            raise _unreadable(self.text, accepted) from error

    def _clause(self, words: list[str]) -> None:
        if words[:1] == ["reduce"] and len(words) == 3:
            self.reductions.append((words[1], words[2]))
        elif words[:1] == ["beside"] and len(words) == 3:
            self.beside.append((words[1], int(words[2])))
        elif words[:1] == ["size"] and len(words) == 3:
            self.sizes.append((words[1], int(words[2])))
        elif words[:1] == ["touch"] and len(words) == 3:
            self.touched.append((words[1], int(words[2])))
        elif words[:1] == ["flop"] and len(words) == 2:
            self.work_flop = float(words[1])
        elif words[:1] == ["why"]:
            self.why = " ".join(words[1:])
        elif words:
            end = words.index("to") if "to" in words else len(words)
            outputs = tuple(map(int, words[end + 1 :])) if "to" in words else None
            inputs = tuple(map(int, words[1:end]))
            self.dependences.append(
                Dependence(effect=Effect(words[0]), inputs=inputs, outputs=outputs)
            )
