"""Random sums, ratios and maxima over a batch: micro-batches equal the whole batch, or are refused.

A step is a list of instructions on values of four forms, as a batch and a model have them:

    samples [8, 3]    rows [8]    vectors [3]    numbers []
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sbp_aten.pass_options import LossMeaning
from sbp_aten.passes import prepare_step
from sbp_core.errors import GraphError
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.programs import graph_states, split_batch

NUM_SAMPLES, WIDTH = 8, 3
RATE = 0.1

SAMPLES, ROWS, VECTORS, NUMBERS = "samples", "rows", "vectors", "numbers"


def bounded(value: Tensor) -> Tensor:
    """Return something between 0.5 and 1.5, to divide by."""
    return 1 + value.tanh() / 2


#: Those of the pointwise that add, scale or shift.
SUMS = ("neg", "half", "more", "add", "sub", "apart")

#: What makes a value of others: from the forms of its arguments to that of its result.
Operator = tuple[Callable[..., Tensor], tuple[str, ...], str]

#: Of a form, and of equal forms.
POINTWISE: dict[str, tuple[Callable[..., Tensor], int]] = {
    "neg": (torch.neg, 1),
    "tanh": (torch.tanh, 1),
    "square": (lambda a: a.tanh().square(), 1),
    "half": (lambda a: 0.5 * a, 1),
    "more": (lambda a: a + 0.7, 1),
    "add": (torch.add, 2),
    "sub": (torch.sub, 2),
    "apart": (lambda a, b: a - 2 * b, 2),
    "mul": (torch.mul, 2),
    "div": (lambda a, b: a / bounded(b), 2),
    "maximum": (torch.maximum, 2),
    "where": (lambda a, b, c: torch.where(a > 0.1, b, c), 3),
    "masked": (lambda a, b: a.masked_fill(b > 0, 0.0), 2),
    "detached": (torch.detach, 1),
}

REDUCTIONS: dict[str, Operator] = {
    "sum of samples": (lambda a: a.sum(0), (SAMPLES,), VECTORS),
    "mean of samples": (lambda a: a.mean(0), (SAMPLES,), VECTORS),
    "largest of samples": (lambda a: a.detach().amax(0), (SAMPLES,), VECTORS),
    "smallest of samples": (lambda a: a.detach().amin(0), (SAMPLES,), VECTORS),
    "sum of rows": (torch.sum, (ROWS,), NUMBERS),
    "mean of rows": (torch.mean, (ROWS,), NUMBERS),
    "largest of rows": (lambda a: a.detach().amax(), (ROWS,), NUMBERS),
    "and the largest": (lambda a, b: a + b.detach().amax(), (NUMBERS, ROWS), NUMBERS),
    "less the largest": (lambda a, b: a - b.detach().amax(), (NUMBERS, ROWS), NUMBERS),
    "smallest of rows": (lambda a: a.detach().amin(), (ROWS,), NUMBERS),
    "sum": (torch.sum, (SAMPLES,), NUMBERS),
    "mean": (torch.mean, (SAMPLES,), NUMBERS),
    "largest": (torch.amax, (SAMPLES,), NUMBERS),  # its gradient is refused
    "sum of each": (lambda a: a.sum(1), (SAMPLES,), ROWS),
    "largest of each": (lambda a: a.amax(1), (SAMPLES,), ROWS),
    "sum of a vector": (torch.sum, (VECTORS,), NUMBERS),
    "largest of a vector": (torch.amax, (VECTORS,), NUMBERS),
    "products": (torch.mv, (SAMPLES, VECTORS), ROWS),
    "weighted": (lambda a, b: (a[:, None] * b).sum(0), (ROWS, SAMPLES), VECTORS),
}

#: Values of two forms.
MIXED: dict[str, Operator] = {
    f"{name} of {one} and {other}": (operator, (one, other), one)
    for name, operator in {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "div": lambda a, b: a / bounded(b),
    }.items()
    for one, other in ((SAMPLES, VECTORS), (SAMPLES, NUMBERS), (ROWS, NUMBERS), (VECTORS, NUMBERS))
} | {
    "rows of samples": (lambda a, b: a * b[:, None], (SAMPLES, ROWS), SAMPLES),
    "divided rows": (lambda a, b: a / bounded(b)[:, None], (SAMPLES, ROWS), SAMPLES),
}

ALIKE: dict[str, Operator] = {
    f"{name} of {form}": (operator, (form,) * count, form)
    for name, (operator, count) in POINTWISE.items()
    for form in (SAMPLES, ROWS, VECTORS, NUMBERS)
}
LINEAR = {name: one for name, one in ALIKE.items() if name.split()[0] in SUMS}
OTHERS = {name: one for name, one in ALIKE.items() if name not in LINEAR}


def added_up(start: Tensor, terms: Iterable[Tensor], sign: int = 1) -> Tensor:
    """Return a number and others that are added to it one after the other, or taken away."""
    for term in terms:
        start = start + term if sign > 0 else start - term
    return start


#: What takes samples one by one, or in groups.
LOOPS: dict[str, Operator] = {
    "added up": (lambda a, b: added_up(b, (row.sum() for row in a)), (SAMPLES, NUMBERS), NUMBERS),
    "added to": (lambda a, b: added_up(b, a), (ROWS, NUMBERS), NUMBERS),
    "taken away": (lambda a, b: added_up(b, a, -1), (ROWS, NUMBERS), NUMBERS),
    "turns over a number": (
        lambda a, b: added_up(a.sum(), a / bounded(b)),
        (ROWS, NUMBERS),
        NUMBERS,
    ),
    "added to the largest": (lambda a: added_up(a.detach().amax(), a), (ROWS,), NUMBERS),
    "turns of vectors": (lambda a, b: added_up(b, a), (SAMPLES, VECTORS), VECTORS),
    "weighted turns": (
        lambda a, b, c: added_up(c, map(torch.mul, a, b)),
        (SAMPLES, ROWS, VECTORS),
        VECTORS,
    ),
    "each sample": (lambda a: torch.stack([row.square() for row in a]), (SAMPLES,), SAMPLES),
    "two samples each": (lambda a: torch.cat([-two for two in a.split(2)]), (SAMPLES,), SAMPLES),
    "number of each": (lambda a: torch.stack([row.sum() for row in a]), (SAMPLES,), ROWS),
}

#: Groups of operators that are drawn equally often.
GROUPS = (LINEAR, OTHERS, REDUCTIONS, MIXED, LOOPS)
OPERATORS = LINEAR | OTHERS | REDUCTIONS | MIXED | LOOPS


@dataclass(frozen=True)
class Instruction:
    """An operator, and which values of their forms it takes; the last is 0, the one before 1."""

    name: str
    places: tuple[int, ...]


class Scores(nn.Module):
    """Scores of samples, and numbers that are the same for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.shift = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def make_model() -> Scores:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Scores().double()


def make_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 2, dtype=torch.float64, generator=generator)
    weights = torch.rand(NUM_SAMPLES, dtype=torch.float64, generator=generator)
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 0, 1]).double()
    return {"x": x, "weights": weights, "mask": mask}


@st.composite
def programs(draw: st.DrawFn) -> tuple[Instruction, ...]:
    """Draw instructions; whatever they are, each finds its arguments."""
    made = []
    for _ in range(draw(st.integers(2, 9))):
        group = draw(st.sampled_from(GROUPS))
        name = draw(st.sampled_from(sorted(group)))
        _, forms, _ = group[name]
        places = tuple(draw(st.sampled_from((0, 0, 0, 1, 1, 2))) for _ in forms)
        made.append(Instruction(name, places))
    return tuple(made)


def values_of(
    program: tuple[Instruction, ...], model: Scores, batch: dict[str, Tensor]
) -> dict[str, list[Tensor]]:
    """Return what instructions make, by form, after what they are given."""
    values = {
        SAMPLES: [batch["x"][:, :1].expand(-1, WIDTH), model(batch["x"])],
        ROWS: [batch["weights"], batch["mask"]],
        VECTORS: [model.scale],
        NUMBERS: [model.shift],
    }
    for one in program:
        operator, forms, form = OPERATORS[one.name]
        given = [
            values[of][-1 - place % len(values[of])]
            for of, place in zip(forms, one.places, strict=True)
        ]
        values[form].append(operator(*given))
    return values


def loss_of(
    program: tuple[Instruction, ...], model: Scores, batch: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of what the last instructions make as a loss, and numbers as metrics."""
    values = values_of(program, model, batch)
    loss = values[NUMBERS][-1] + values[VECTORS][-1].sum() + 0.3 * values[SAMPLES][-1].mean()
    loss = loss + 0.01 * model.shift  # of some parameter, whatever is detached
    loss = loss + (values[ROWS][-1] * batch["mask"]).sum() / batch["mask"].sum()
    metrics = {f"n{at}": one.detach().clone() for at, one in enumerate(values[NUMBERS][-3:])}
    return loss, metrics


def deviation(program: tuple[Instruction, ...], count: int) -> float | None:
    """Return how far micro-batches are off the whole batch; None if they are refused."""
    loss: Any = partial(loss_of, program)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    graph = capture(model, loss, make_batch(), optimizer)
    try:
        graph = prepare_step(graph, count, loss=LossMeaning.WHOLE_BATCH)
    except GraphError:
        return None
    states = graph_states(graph, initial_states(model, optimizer))
    found, states = run_graph(graph, states, split_batch(make_batch(), count), {"lr": RATE})

    eager = make_model()
    wanted, metrics = loss(eager, make_batch())
    wanted.backward()
    torch.optim.SGD(eager.parameters(), lr=RATE).step()
    pairs = [(states[name], value) for name, value in eager.state_dict().items()]
    pairs += [(found[name], value) for name, value in {"loss": wanted, **metrics}.items()]
    with torch.no_grad():
        off = [(one - other).abs().max() / (1 + other.abs().max()) for one, other in pairs]
        return float(torch.stack(off).max())  # no number, if one of them is none


def check(max_examples: int) -> None:
    ran = []

    @settings(max_examples=max_examples, deadline=None)
    @given(program=programs(), count=st.sampled_from([2, 4, 8]))
    def of_random_steps(program: tuple[Instruction, ...], count: int) -> None:
        off = deviation(program, count)
        assert off is None or off < 1e-12
        ran.append(off is not None)

    of_random_steps()
    assert sum(ran) > 0.6 * len(ran)


@pytest.mark.slow
def test_micro_batches_equal_the_whole_batch_or_are_refused():
    check(15)


@pytest.mark.exhaustive
def test_micro_batches_of_many_random_steps():
    check(5000)
