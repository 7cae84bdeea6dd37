"""Strategies, the results of planners: stage and signature of every op, storage of every state.

A signature is the nd-SBP (distribution over the mesh) of each input and output of an op. A
`Strategy` is immutable, and readable and editable as a file. It is compiled into a plan. Only its
`report` mentions how it was found.

In files, a decision on an op or a state is a text as errors print it, with its stage:

>>> Assignment.parse("(S(0), B) (B, S(1)) -> (S(0), S(1)) @1").signature.outputs
(NdSbp(S(0), S(1)),)
>>> str(Storage.parse("(B, S(1))"))
'(B, S(1)) @0'
>>> str(Storage.parse("(B, S(1)) host @1"))
'(B, S(1)) host @1'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sbp_core.errors import SbpValueError
from sbp_core.graph_variant import GraphVariant
from sbp_core.pipeline import Action, PipelineSchedule
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp
from sbp_core.serialize import Document, JsonForm, Lines

__all__ = ["Assignment", "Signature", "Storage", "Strategy"]

#: The accepted entries of a storage.
_STORED = "S(dim), B"

#: Written after the nd-SBP of a state that is offloaded.
_HOST = "host"


@dataclass(frozen=True, slots=True)
class Signature:
    """How one call is split: the nd-SBP of its tensor arguments and of its outputs, in order.

    `inputs` has one entry for each tensor argument in argument order (list arguments flattened,
    repeated tensors repeated, host scalars left out); `outputs` one for each output value.
    """

    inputs: tuple[NdSbp, ...]
    outputs: tuple[NdSbp, ...]

    def __str__(self) -> str:
        left = " ".join(f"({sbp})" for sbp in self.inputs)
        right = " ".join(f"({sbp})" for sbp in self.outputs)
        return f"{left} -> {right}".strip()

    @classmethod
    def parse(cls, text: str) -> Signature:
        """Read the text of a signature.

        Raises:
            SbpValueError: the text is not a signature.
        """
        left, arrow, right = text.partition("->")
        if not arrow:
            raise SbpValueError(
                f"{text!r} is no signature", accepted="such as (S(0), B) (B, B) -> (S(0), B)"
            )
        return cls(tuple(_parsed(left)), tuple(_parsed(right)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The stage and the signature of one op."""

    stage: int
    signature: Signature

    def __str__(self) -> str:
        return f"{self.signature} @{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Assignment:
        """Read the text of an assignment; without a stage, it is 0.

        Raises:
            SbpValueError: the text is not an assignment.
        """
        rest, stage = _staged(text)
        return cls(stage=stage, signature=Signature.parse(rest))

    @classmethod
    def json_form(cls) -> JsonForm:
        """Return its JSON form: its text."""
        return JsonForm(str, str, cls.parse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The stage on which a graph input (state or batch tensor) is stored, and its nd-SBP there.

    Args:
        stage: The stage whose ranks hold it.
        sbp: Its nd-SBP there.
        offloaded: Whether each rank keeps its part in host memory between updates; only for states
            that the optimizer alone reads (see `sbp_core.compile.offload`).

    Raises:
        SbpValueError: an entry is `P`, which cannot be stored.
    """

    stage: int
    sbp: NdSbp
    offloaded: bool = False

    def __post_init__(self) -> None:
        if self.sbp.has_partial:
            raise SbpValueError(
                f"nothing is stored as P, and this is ({self.sbp})",
                accepted=_STORED,
                todo="store it as B or S(dim); only what operators leave may be P",
            )

    def __str__(self) -> str:
        return f"({self.sbp}){f' {_HOST}' * self.offloaded} @{self.stage}"

    @classmethod
    def parse(cls, text: str) -> Storage:
        """Read the text of a storage; without a stage, it is 0.

        Raises:
            SbpValueError: the text is not a storage.
        """
        rest, stage = _staged(text)
        before = rest.removesuffix(_HOST).rstrip()
        offloaded = before != rest and before.endswith(")")
        rest = before if offloaded else rest
        try:
            found = list(_parsed(rest))
        except SbpValueError as error:
            # Partial values, which operators may return, cannot be stored.
            accepted = error.accepted.partition(", P, ")[0]
            raise SbpValueError(error.what, accepted=accepted) from error
        if len(found) != 1:
            raise SbpValueError(f"{rest!r} is no nd-SBP", accepted="such as (S(0), B)")
        return cls(stage=stage, sbp=found[0], offloaded=offloaded)

    @classmethod
    def json_form(cls) -> JsonForm:
        """Return its JSON form: its text."""
        return JsonForm(str, str, cls.parse)


def _staged(text: str) -> tuple[str, int]:
    """Return the text of a decision without its stage, and the stage.

    Raises:
        SbpValueError: the text after the `@` is not a stage.
    """
    rest, at, stage = text.rpartition("@")
    if not at:
        return text.strip(), 0
    digits = stage.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
        raise SbpValueError(f"{digits!r} is no stage", accepted="@0, @1, ...")
    return rest.strip(), int(digits)


def _parsed(text: str) -> Iterator[NdSbp]:
    """Yield the nd-SBPs of a text such as `(S(0), B) (B, B)`.

    Raises:
        SbpValueError: the text contains anything else.
    """
    depth, start = 0, 0
    for index, letter in enumerate(text):
        if letter == "(":
            start = index if depth == 0 else start
            depth += 1
        elif letter == ")" and depth > 0:
            depth -= 1
            if depth == 0:
                yield NdSbp.parse(text[start + 1 : index])
        elif depth == 0 and not letter.isspace():
            raise SbpValueError(f"{text!r} is outside of parentheses", accepted="(S(0), B)")
    if depth:
        raise SbpValueError(f"{text!r} has parentheses without their ends", accepted="(S(0), B)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One decision for every op and every state of one graph.

    Args:
        planner: The planner that made it.
        graph_hash: Hash of the graph it was made for.
        stages: Placement of each stage.
        num_micro_batches: Micro-batches of one step.
        in_flight: For each stage, how many micro-batches may be between its forward and its
            backward: `num_micro_batches` everywhere is GPipe, `num_stages - stage` is 1F1B.
        orders: For each set of ranks that hold the same stages, by their first stage, the order of
            their forward and backward work, such as `0F0 0F1 0B0`: stage, F(orward), B(ackward) or
            I(nput gradient) and W(eight gradient), micro-batch. Empty: as `in_flight` allows.
        staleness: For each stage, the age in updates of the parameters that forward and backward of
            a micro-batch use, if a step has several updates; `num_stages - 1 - stage` is PipeDream
            with an update for each micro-batch, 1 everywhere is 2BW. Empty: none.
        regather: Patterns (`*`, `?`) of the parameters that are gathered again for the backward
            phase; the gathered copy of any other parameter lives from its forward use to its last
            backward use. `("*",)` is ZeRO-3 as it was published, `()` keeps all copies.
        bucket_bytes: Most bytes of a bucket, a buffer in which small tensors travel together; 0 for
            no buckets. None: by price, see `sbp_core.compile.bucket_price`. Options of the compiler
            that give a number have precedence.
        variant: The variant of the step, if the planner has chosen it.
        report: The planner's predictions and reasons; plain JSON values, SI base units.
        storage: Stage and SBP of every tensor input, and which are offloaded.
        nodes: Stage and signature of every node that computes tensors.
    """

    planner: str
    graph_hash: str
    stages: tuple[Placement, ...]
    num_micro_batches: int
    in_flight: tuple[int, ...]
    orders: tuple[str, ...] = ()
    staleness: tuple[int, ...] = ()
    regather: tuple[str, ...] = ("*",)
    bucket_bytes: int | None = None
    variant: GraphVariant | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
    storage: Mapping[str, Storage]
    nodes: Mapping[str, Assignment]

    def __post_init__(self) -> None:
        if len(self.in_flight) != len(self.stages) or min(self.in_flight, default=1) < 1:
            raise SbpValueError(
                f"in_flight={self.in_flight} does not fit {len(self.stages)} stages",
                accepted="one quota >= 1 for each stage",
            )
        if self.staleness and (len(self.staleness) != len(self.stages) or min(self.staleness) < 0):
            raise SbpValueError(
                f"staleness={self.staleness} does not fit {len(self.stages)} stages",
                accepted="one number of updates >= 0 for each stage, or none at all",
            )
        if self.bucket_bytes is not None and self.bucket_bytes < 0:
            raise SbpValueError(
                f"bucket_bytes={self.bucket_bytes}", accepted="0 or more bytes, or null"
            )
        if self.num_micro_batches < 1:
            raise SbpValueError(
                f"num_micro_batches={self.num_micro_batches}", accepted="an integer >= 1"
            )
        if self.variant and self.variant.num_micro_batches != self.num_micro_batches:
            raise SbpValueError(
                f"num_micro_batches={self.num_micro_batches}, but the variant has "
                f"{self.variant.num_micro_batches}",
                accepted="the same number in both",
            )

        if self.orders:
            self._pipeline()

    @property
    def actions(self) -> Mapping[int, tuple[Action, ...]]:
        """The order of the actions of each rank; empty if `in_flight` decides."""
        if not self.orders:
            return {}
        pipeline = self._pipeline()
        orders = dict(zip(pipeline.placement, pipeline.orders, strict=True))
        return {rank: orders[stages] for rank, stages in self._stages_of().items()}

    @property
    def splits_backward(self) -> bool:
        """Whether input gradients and weight gradients are separate actions."""
        return any("W" in order for order in self.orders)

    def _stages_of(self) -> dict[int, tuple[int, ...]]:
        """Return the stages of each rank, ascending."""
        found: dict[int, tuple[int, ...]] = {}
        for stage, placement in enumerate(self.stages):
            for rank in placement.rank_list:
                found[rank] = (*found.get(rank, ()), stage)
        return found

    def _pipeline(self) -> PipelineSchedule:
        """Return the schedule of `orders`.

        Raises:
            SbpValueError: it is invalid: the text of an action is invalid, an action is repeated or
                missing, or there is not one order for each set of ranks.
        """
        placement = tuple(sorted(set(self._stages_of().values())))
        return PipelineSchedule(
            name="orders",
            num_micro_batches=self.num_micro_batches,
            placement=placement,
            orders=tuple(tuple(map(Action.parse, order.split())) for order in self.orders),
            micro_batches_per_update=self.num_micro_batches,
        )

    def is_regathered(self, parameter: str) -> bool:
        """Whether a parameter is gathered again for the backward phase."""
        return any(fnmatchcase(parameter, pattern) for pattern in self.regather)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of all stages, sorted."""
        return tuple(sorted({rank for stage in self.stages for rank in stage.rank_list}))

    def on_its_stages(self, lines: Lines | None = None) -> Strategy:
        """Return the strategy itself after checking that every decision is on an existing stage.

        Args:
            lines: The lines of the file that it comes from, for the message.

        Raises:
            SbpValueError: a decision is on another stage.
        """
        count = len(self.stages)
        for section, entries in (("storage", self.storage), ("nodes", self.nodes)):
            for name, entry in entries.items():
                if not 0 <= entry.stage < count:
                    raise SbpValueError(
                        f"{section}: {name} is on stage {entry.stage} of {count}",
                        where=lines.where((section, name)) if lines else "",
                        accepted=f"@0 to @{count - 1}",
                    )
        return self

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        return STRATEGY.dump(self)

    @classmethod
    def from_json(cls, value: object) -> Strategy:
        """Read the result of `to_json`.

        Raises:
            SbpValueError: it is not a strategy, or was written by another version.
        """
        return STRATEGY.load(value).on_its_stages()

    def save(self, path: Path) -> None:
        """Write the strategy as JSON, one line for each op, for people to read and edit."""
        STRATEGY.write(self, path)

    @classmethod
    def load(cls, path: Path) -> Strategy:
        """Read a file that `save` wrote.

        Raises:
            SbpValueError: it does not exist, or see `from_json`.
        """
        return cls.load_with_lines(path)[0]

    @classmethod
    def load_with_lines(cls, path: Path) -> tuple[Strategy, Lines]:
        """Read a file that `save` wrote; return also the lines of its decisions.

        Raises:
            SbpValueError: it does not exist, or see `from_json`.
        """
        read, lines = STRATEGY.read_with_lines(path)
        return read.on_its_stages(lines), lines


#: The file of a strategy.
STRATEGY = Document(
    kind=Strategy,
    format="sbp-strategy",
    version=2,
    todo="correct that line, or plan again with this version",
)
