"""Batches of many lengths: padded to a few sizes, they train as plain PyTorch does unpadded."""

from __future__ import annotations

import copy
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import masked_lengths
import pytest
import torch
from masked_lengths import PAD_TO, Network, Pooled, batch_of, loss_of, made
from programs import registry
from torch import nn

from sbp_core.boxing import BoxingBackend
from sbp_core.errors import ConfigError, RunError, SbpValueError
from sbp_core.processes import Line, supervise
from sbp_launch import parallelize
from sbp_launch.parallel import LengthBuckets

LAYOUTS = {
    "one rank": {},
    "zero": {"mesh": 4, "planner": "manual/zero"},
    "data x tensor": {
        "mesh": (2, 2),
        "micro_batches": 2,
        "pins": {"block.up.weight": {"tensor": "S(0)"}},
    },
}


def start(model, example=None, loss=loss_of, pad_to=PAD_TO, **layout):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    example = batch_of(99, 5) if example is None else example
    return parallelize(model, loss, example, optimizer, pad_to=pad_to, **layout)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_of_many_lengths_train_as_plain_pytorch_does_unpadded(layout):
    model, plain = made(Network), made(Network)
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    lengths = torch.randint(1, 13, (10,), generator=torch.Generator().manual_seed(1)).tolist()

    with start(model, **LAYOUTS[layout]) as step:
        assert len(step.forms) == 3
        for index, length in enumerate(lengths):
            batch = batch_of(index, length)
            before = copy.deepcopy(batch)
            found = float(step(batch))
            other.zero_grad()
            wanted = loss_of(plain, batch)
            wanted.backward()
            other.step()
            assert abs(found - wanted.item()) <= 1e-12
            torch.testing.assert_close(batch, before, rtol=0, atol=0)
            with torch.no_grad():
                held_out = loss_of(plain, batch_of(50, length)).item()
            assert abs(float(step.evaluate(batch_of(50, length))) - held_out) <= 1e-12
        assert len(step.forms) == 3
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)


def test_many_sizes_are_planned_ahead_without_a_warning(caplog):
    pad_to = LengthBuckets(sizes=tuple(range(1, 8)), values=PAD_TO["values"])

    with start(made(Pooled), pad_to=pad_to) as step:
        assert len(step.forms) == 7
        step(batch_of(0, 5))
        assert len(step.forms) == 7
    assert "forms by now" not in caplog.text


def test_the_report_says_what_was_proved():
    out = io.StringIO()

    start(made(Pooled)).report(out)
    assert (
        "padding: to 4, 8, 12 at dim 1; proved: a loss and gradients of 5 positions are those of 8"
        in re.sub(r"\s+", " ", out.getvalue())
    )
    for length, said in ((4, "4 positions are those of 8"), (12, "11 positions are those of 12")):
        out = io.StringIO()
        start(made(Pooled), batch_of(0, length)).report(out)
        assert said in re.sub(r"\s+", " ", out.getvalue())


class Careless(Pooled):
    """Takes padding into the mean."""

    def forward(self, words, mask):
        return super().forward(words, torch.ones_like(mask))


class Attentive(Network):
    """Attends to padding."""

    def forward(self, words, mask):
        return super().forward(words, torch.ones_like(mask))


class Normed(Pooled):
    """Has batch norms, whose means padding moves; and dropout, for which it is evaluated."""

    def __init__(self):
        super().__init__()
        self.batch_norm, self.drop = nn.BatchNorm1d(masked_lengths.SIZE), nn.Dropout(0.1)

    def forward(self, words, mask):
        x = self.embed(words).transpose(1, 2)
        return self.head(self.drop(self.batch_norm(x)).transpose(1, 2))


class Unlearned(Pooled):
    """Its loss stays, and a gradient does not: what padding moves is not used yet."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, words, mask):
        logits = super().forward(words, mask)
        return logits + self.scale * logits.mean(1, keepdim=True)


def mean_over_positions(model, batch):
    logits = model(batch["input_ids"], batch["attention_mask"])
    each = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return each.mean()


@pytest.mark.parametrize(
    ("make", "loss", "values", "told"),
    [
        (Careless, loss_of, {}, r"padding changes the loss: [\d.]+ of 5 positions, [\d.]+ padded"),
        (Attentive, loss_of, {}, r"padding changes the loss: "),
        (Normed, loss_of, {}, r"padding changes the loss: "),
        (Unlearned, loss_of, {}, r"the gradient of 'scale', but not the loss: [-\d.]+ of 5 pos"),
        (Pooled, mean_over_positions, {}, r"padding changes the loss: "),
        (Pooled, loss_of, {"labels": 0}, r"padding changes the loss: "),
        (Pooled, loss_of, {"attention_mask": 1}, r"padding changes the loss: "),
    ],
)
def test_padding_that_is_not_neutral_is_refused_with_the_usual_causes(make, loss, values, told):
    torch.manual_seed(0)
    model = make().double()
    states = copy.deepcopy(model.state_dict())
    pad_to = {**PAD_TO, "values": {**PAD_TO["values"], **values}}

    with pytest.raises(
        ConfigError, match=rf"{told}(.|\n)*usual causes: labels(.|\n)*'prove': False"
    ):
        start(model, loss=loss, pad_to=pad_to)

    assert model.training and all(module.training for module in model.modules())
    torch.testing.assert_close(model.state_dict(), states, rtol=0, atol=0)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize("first", [1e-30, 0.0], ids=["next to nothing", "nothing"])
def test_padding_is_proved_again_of_a_number_that_changes(call, first):
    weight = {"of all": 0.0}

    def loss(model, batch):
        scores = model(batch["input_ids"], batch["attention_mask"])
        return loss_of(model, batch) + weight["of all"] * scores.square().mean()

    with start(made(Network), loss=loss) as step:
        step(batch_of(0, 5))
        weight["of all"] = first
        step(batch_of(0, 5))
        weight["of all"] = 1.0
        for _ in range(2):  # it is not forgotten
            with pytest.raises((ConfigError, RunError), match="padding changes the loss"):
                getattr(step, call, step)(batch_of(0, 5))
        weight["of all"] = 0.0
        step(batch_of(0, 5))


def test_padding_is_proved_again_of_a_layer_that_is_trained_later():
    model = made(Network)
    model.late = nn.Linear(1, 1).double()
    model.late.requires_grad_(False)
    nn.init.zeros_(model.late.weight), nn.init.zeros_(model.late.bias)

    def loss(model, batch):
        scores = model(batch["input_ids"], batch["attention_mask"])
        return (
            loss_of(model, batch) + model.late(scores.detach().square().mean().reshape(1, 1)).sum()
        )

    with start(model, loss=loss) as step:
        step(batch_of(0, 5))
        model.late.requires_grad_(True)
        with pytest.raises((ConfigError, RunError), match=r"gradient of 'late\.weight'"):
            step(batch_of(0, 5))


def test_a_model_without_values_is_proved_on_random_ones(caplog):
    with torch.device("meta"):
        model = Pooled().double()

    start(model)
    assert "not proved" not in caplog.text
    with torch.device("meta"):
        careless = Careless().double()
    with pytest.raises(ConfigError, match="padding changes the loss"):
        start(careless)


def test_without_a_proof_anything_is_padded():
    out = io.StringIO()

    with start(made(Careless), compile={"prove": False}) as step:
        step(batch_of(0, 7))
    step.report(out)
    assert "not proved to be neutral, because compile.prove=false" in re.sub(
        r"\s+", " ", out.getvalue()
    )


def test_a_model_with_dropout_is_proved_in_evaluation_mode():
    out, model = (
        io.StringIO(),
        nn.Sequential(nn.Embedding(11, 8), nn.Dropout(0.5), nn.Linear(8, 11)),
    )

    def loss(model, batch):
        logits = model(batch["input_ids"]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["labels"].flatten())

    start(model, loss=loss).report(out)
    assert "; proved: " in out.getvalue() and model[1].training


def test_what_would_take_too_long_is_said_not_to_be_proved(caplog):
    out = io.StringIO()

    start(made(Pooled), compile={"prove_s": 1e-6}).report(out)
    assert "it is not proved that padding is neutral: it would take about" in caplog.text
    assert "12 at dim 1; not proved to be neutral: it would take" in re.sub(
        r"\s+", " ", out.getvalue()
    )


def test_a_metric_that_padding_changes_is_told(caplog):
    def loss(model, batch):
        return loss_of(model, batch), {"filled": batch["attention_mask"].double().mean()}

    start(made(Pooled), loss=loss)
    assert "padding changes the metric 'filled'" in caplog.text


def test_the_proof_leaves_program_and_random_numbers_as_they_are():
    calls, kept = [], {}
    model = made(Pooled)
    model.drop = nn.Dropout(0.0).eval()

    def loss(model, batch):
        kept.setdefault("scale", 1.0)
        return loss_of(model, batch) * kept["scale"]

    model.register_forward_pre_hook(lambda module, given: calls.append(1) or None)
    state = torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    with pytest.raises(ConfigError, match="changes what it reads"):  # the hook counts its calls
        start(model, loss=loss)
    model._forward_pre_hooks.clear()
    step = start(model, loss=loss)
    assert torch.equal(torch.get_rng_state(), state) and not kept
    assert [module.training for module in model.modules()] == modes
    with step:
        for length in (2, 7, 12):
            step(batch_of(0, length))
        assert len(step.forms) == 3


REFUSED = {
    "longer": (
        lambda batch: batch_of(0, 13),
        r"'input_ids' has 13 positions at dim 1, more than the largest size, 12(.|\n)*"
        r"give sizes=\(4, 8, 12, 13\)",
    ),
    "lengths differ": (
        lambda batch: {**batch, "labels": batch["labels"][:, 1:]},
        "'input_ids' has 6 positions at dim 1, and 'labels' has 5",
    ),
    "is missing": (
        lambda batch: {"input_id": batch["input_ids"], "labels": batch["labels"]},
        r"'input_ids', and the batch has no tensor(.|\n)*mean 'input_id'\?",
    ),
    "has no dim": (
        lambda batch: {**batch, "labels": batch["labels"][:, 0]},
        r"'labels' of shape \(8,\) has no dim 1",
    ),
    "is not named": (
        lambda batch: {**batch, "weight": torch.ones(8, 6)},
        r"'weight' has 6 positions at dim 1(.|\n)*add 'weight': VALUE",
    ),
    "does not hold": (
        lambda batch: {**batch, "labels": batch["labels"].to(torch.uint8)},
        "'labels' is of dtype uint8, which does not hold -100",
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_cannot_be_padded_is_refused_by_name_before_anything_runs(change):
    apply, told = REFUSED[change]
    example = {**batch_of(99, 5), "weight": torch.ones(8, 3)}

    with pytest.raises(ConfigError, match=told + r"(.|\n)*" * (change == "longer")):
        start(made(Pooled), apply({**batch_of(1, 6)}))
    with start(made(Pooled), example) as step:
        for call in (step, step.evaluate):
            with pytest.raises(SbpValueError, match=told):
                call(apply({**batch_of(1, 6), "weight": torch.ones(8, 3)}))
        assert step.steps_done == 0
        step({**batch_of(1, 6), "weight": torch.ones(8, 3)})


def test_settings_that_cannot_be_meant_are_refused():
    with pytest.raises(ConfigError, match=r"17 lengths, and a step has at most 16 forms"):
        LengthBuckets(sizes=tuple(range(1, 18)), values={"x": 0})
    with pytest.raises(ConfigError, match=r"no setting|unknown|size"):
        start(made(Pooled), pad_to={"size": (4,), "values": {"input_ids": 0}})


def test_a_program_that_changes_has_another_form_of_each_size():
    model, plain = made(Pooled), made(Pooled)
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)

    with start(model) as step:
        for index, length in enumerate((3, 7, 7, 3, 3)):
            if index == 2:
                for one in (model, plain):
                    one.head.requires_grad_(False)
            found = float(step(batch_of(index, length)))
            other.zero_grad()
            wanted = loss_of(plain, batch_of(index, length))
            wanted.backward()
            other.step()
            assert abs(found - wanted.item()) <= 1e-12
        assert len(step.forms) == 5
    with pytest.raises(RunError):
        step(batch_of(0, 3))


@pytest.mark.slow
@pytest.mark.parametrize("boxing", ["torch", "mpi"])
def test_processes_agree_on_the_size_of_their_parts(boxing):
    backend: Any = registry().make("boxing", boxing, {})
    assert isinstance(backend, BoxingBackend)
    lines: list[Line] = []
    command = [sys.executable, str(Path(masked_lengths.__file__))]

    ended = supervise(backend.launch_specs(2, command), timeout_s=240, on_line=lines.append)

    assert ended.error() is None, "\n".join(map(str, lines))
    found = {one["rank"]: one for line in lines if (one := _line(line.text))}
    for rank in (0, 1):
        assert found[rank]["off"] <= 1e-12
        assert (found[rank]["forms"], found[rank]["steps"]) == (3, 6)
        assert "'input_ids' has 13 positions at dim 1, more than" in found[rank]["said"]
    assert found[0]["said"].startswith("rank 1 cannot pad its part of the batch: 'input_ids'")


def _line(text: str) -> dict[str, Any]:
    return json.loads(text) if text.startswith("{") else {}
