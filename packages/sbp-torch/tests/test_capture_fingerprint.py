from __future__ import annotations

import argparse
import doctest
import functools
import gc
import importlib
import itertools
import os
import re
import subprocess
import sys
import threading
import time
import types
from abc import ABC
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sbp_torch.capture.fingerprint import sources
from torch import nn

from sbp_core.compile.cache import PlanCache
from sbp_core.errors import CaptureError
from sbp_core.graph.serialize import graph_hash
from sbp_torch.capture import capture, fingerprint
from sbp_torch.testing.models import PROGRAMS, Gpt, Program, square_loss, token_loss

find = fingerprint.fingerprint

HELPER = "SCALE = 2.0\n\ndef scaled(x):\n    return x * SCALE\n"

MODEL = """
import torch
from torch import nn
import a_helper

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.names = {"b", "a", "c", "d"}
        self.table = {"k": (1, 2.5, None)}

    def forward(self, x):
        return self.inner(self.layer(x))

    def inner(self, x):
        return a_helper.scaled(x) if "a" in {"a", "b", "c"} else x

def loss(model, batch):
    return model(batch["x"]).square().mean()
"""


def _of(program: Program, **changes: Any) -> str:
    model, optimizer = program.build()
    parts = {"model": model, "loss": program.loss, "batch": program.batches(1)[0],
             "optimizer": optimizer} | changes  # fmt: skip
    return find(parts["model"], parts["loss"], parts["batch"], parts["optimizer"])


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model in a module of the user's, which calls a helper in another one."""
    (tmp_path / "a_helper.py").write_text(HELPER)
    (tmp_path / "a_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("a_model")
    for name in ("a_model", "a_helper"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_the_same_step_built_again_has_the_same_fingerprint(program: Program) -> None:
    assert _of(program) == _of(program)


def test_different_programs_have_different_fingerprints() -> None:
    found = [_of(program) for program in PROGRAMS.values()]

    assert len(set(found)) == len(found)


def test_values_of_parameters_and_batches_and_rates_do_not_count(gpt: Program) -> None:
    model, optimizer = gpt.build()
    before = find(model, gpt.loss, gpt.batches(1)[0], optimizer)

    nn.init.ones_(model.head.weight)
    optimizer.param_groups[0]["lr"] = 0.5
    after = find(model, gpt.loss, gpt.batches(2)[1], optimizer)

    assert after == before


def _narrow(model: nn.Module) -> None:
    model.head = nn.Linear(8, 16, bias=False)


def _tie(model: nn.Module) -> None:
    model.head.weight = model.tokens.weight


def _rename(model: nn.Module) -> None:
    model.top = model.head
    del model.head


def _patch(model: nn.Module) -> None:
    model.norm.forward = lambda x: x * 2


_CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "shape": _narrow,
    "dtype": lambda model: model.double(),
    "tie": _tie,
    "name": _rename,
    "evaluation mode": lambda model: model.eval(),
    "frozen": lambda model: model.head.weight.requires_grad_(False),
    "attribute": lambda model: setattr(model.norm, "eps", 1e-3),
    "new attribute": lambda model: setattr(model, "scale", 3),
    "hook": lambda model: model.norm.register_forward_hook(lambda *_: None),
    "method of one module": _patch,
    "number of layers": lambda model: model.blocks.append(nn.Identity()),
    "buffer": lambda model: model.register_buffer("extra", torch.zeros(2)),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES.keys())
def test_whatever_changes_on_a_model_changes_the_fingerprint(
    gpt: Program, change: Callable[[nn.Module], object]
) -> None:
    torch.manual_seed(0)
    model = Gpt()
    batch = gpt.batches(1)[0]
    before = find(model, token_loss, batch)

    change(model)

    assert find(model, token_loss, batch) != before


def test_every_setting_of_the_optimizer_but_its_rate_counts(gpt: Program) -> None:
    model = gpt.build()[0]
    makers: list[Callable[..., torch.optim.Optimizer]] = [
        torch.optim.AdamW,
        torch.optim.Adam,
        functools.partial(torch.optim.AdamW, betas=(0.9, 0.95)),
        functools.partial(torch.optim.AdamW, weight_decay=0.5),
        functools.partial(torch.optim.AdamW, amsgrad=True),
        functools.partial(torch.optim.AdamW, lr=torch.tensor(1e-3)),
    ]

    found = [_of(gpt, model=model, optimizer=make(model.parameters())) for make in makers]
    fewer = torch.optim.AdamW(list(model.parameters())[1:])
    found.append(_of(gpt, model=model, optimizer=fewer))
    other = torch.optim.AdamW(list(model.parameters())[:-1])
    found.append(_of(gpt, model=model, optimizer=other))

    assert len(set(found)) == len(found)


def test_the_form_of_the_batch_and_numbers_in_it_count(gpt: Program) -> None:
    model = gpt.build()[0]
    tokens = torch.zeros(4, 6, dtype=torch.long)
    batches = [
        {"tokens": tokens},
        {"tokens": tokens[:2]},
        {"tokens": tokens.int()},
        {"words": tokens},
        {"tokens": tokens, "scale": 1.0},
        {"tokens": tokens, "scale": 2.0},
        [tokens],
        tokens.T,
    ]

    found = [find(model, token_loss, batch) for batch in batches]

    assert len(set(found)) == len(found)


def test_the_loss_counts_with_its_code_closure_and_settings(gpt: Program) -> None:
    model, batch = gpt.build()[0], gpt.batches(1)[0]

    def scaled(by: float) -> Callable[..., Any]:
        return lambda model, batch: token_loss(model, batch) * by

    losses = [
        token_loss,
        square_loss,
        scaled(1.0),
        scaled(2.0),
        functools.partial(token_loss),
        lambda model, batch: token_loss(model, batch) + 1,
    ]

    found = [find(model, loss, batch) for loss in losses]
    again = find(model, scaled(2.0), batch)

    assert len(set(found)) == len(found)
    assert again == found[3]


def test_a_constant_tensor_counts_with_its_values(gpt: Program) -> None:
    model, batch = gpt.build()[0], gpt.batches(1)[0]

    def weighted(weights: torch.Tensor) -> Callable[..., Any]:
        return lambda model, batch: (model(batch) * weights).sum()

    ones, twos = (find(model, weighted(torch.full((2,), n)), batch) for n in (1.0, 2.0))

    assert ones != twos


def test_a_global_that_is_set_at_run_time_counts(user: Any) -> None:
    batch = {"x": torch.zeros(2, 3)}
    before = find(user.Scaled(), user.loss, batch)

    user.a_helper.SCALE = 3.0

    assert find(user.Scaled(), user.loss, batch) != before


ARGUMENTS = argparse.Namespace(scale=1.0)
SPACE = types.SimpleNamespace(scale=1.0)
PATTERN = re.compile("a+")
TEACHER = nn.Linear(3, 3)


class Abstract(ABC):  # noqa: B024 (to have what ABC brings)
    """Like many classes of users, it has attributes that only Python itself understands."""

    scale = 1.0

    @property
    def halved(self) -> float:
        return self.scale / 2


HELD = Abstract()
HELD.space = types.SimpleNamespace(scale=1.0)  # type: ignore[attr-defined]


@torch.library.custom_op("fingerprint_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _of_arguments(model: Any, batch: Any) -> Any:
    return model(batch).mean() * ARGUMENTS.scale


def _of_space(model: Any, batch: Any) -> Any:
    return model(batch).mean() * SPACE.scale


def _of_held(model: Any, batch: Any) -> Any:
    return model(batch).mean() * HELD.space.scale  # type: ignore[attr-defined]


def _of_teacher(model: Any, batch: Any) -> Any:
    return (model(batch) - TEACHER(batch)).square().mean()


def _of_command_line(model: Any, batch: Any) -> Any:
    return model(batch).mean() * len(sys.argv)


_GLOBALS: dict[str, tuple[Callable[..., Any], Any, str, Any]] = {
    "a namespace of argparse": (_of_arguments, ARGUMENTS, "scale", 7.0),
    "a namespace": (_of_space, SPACE, "scale", 7.0),
    "what an object of the user's holds": (_of_held, HELD.space, "scale", 7.0),  # type: ignore[attr-defined]
    "weights of another module": (_of_teacher, TEACHER.bias, "data", torch.full((3,), 7.0)),
    "the command line": (_of_command_line, sys, "argv", [""] * 99),
}


@pytest.mark.parametrize(("loss", "held", "name", "value"), _GLOBALS.values(), ids=_GLOBALS)
def test_a_global_of_an_installed_class_counts(
    monkeypatch: pytest.MonkeyPatch, loss: Callable[..., Any], held: Any, name: str, value: Any
) -> None:
    model, batch = nn.Linear(3, 3), torch.zeros(2, 3)
    before, again = find(model, loss, batch), find(model, loss, batch)
    graph = graph_hash(capture(model, loss, batch))

    monkeypatch.setattr(held, name, value)

    assert again == before
    assert graph_hash(capture(model, loss, batch)) != graph
    assert find(model, loss, batch) != before


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: model(batch).mean() * float(os.environ.get("SCALE", "1")),
        lambda model, batch: model(batch).mean() * float(os.getenv("SCALE", "1")),
    ],
)
def test_a_function_that_reads_the_environment_is_refused(loss: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match=r"os\.(environ|getenv) names the environment"):
        find(nn.Linear(3, 3), loss, torch.zeros(2, 3))


def test_modules_without_files_and_globals_that_do_not_compute_are_no_obstacle() -> None:
    def loss(model: Any, batch: Any) -> Any:
        started = time.perf_counter()
        sys.stderr.write(f"{PATTERN} {sys.version} {list(itertools.chain('a'))} {gc.isenabled()}")
        sys.stderr.write(f"{time.perf_counter() - started} {torch.ops.aten.mm.default} {HELD}")
        return twice(torch.ops.aten.mul(model(batch), 2)).mean()

    model, batch = nn.Linear(3, 3), torch.zeros(2, 3)

    assert find(model, loss, batch) == find(model, loss, batch)


def test_a_helper_that_is_replaced_at_run_time_counts(user: Any) -> None:
    batch = {"x": torch.zeros(2, 3)}
    before = find(user.Scaled(), user.loss, batch)

    user.a_helper.scaled = lambda x: x + 1

    assert find(user.Scaled(), user.loss, batch) != before


def test_a_function_put_into_a_class_of_torch_counts(
    gpt: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _of(gpt)

    monkeypatch.setattr(Gpt, "forward", lambda self, tokens: self.head(self.tokens(tokens)))

    assert _of(gpt) != before


def test_flags_of_torch_and_settings_count(gpt: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = gpt.build()[0], gpt.batches(1)[0]
    found = [find(model, token_loss, batch), find(model, token_loss, batch, settings={"mesh": 4})]

    torch.set_default_dtype(torch.float64)
    try:
        found.append(find(model, token_loss, batch))
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    found.append(find(model, token_loss, batch))

    assert len(set(found)) == 4


def test_what_cannot_be_described_is_refused_with_its_place(gpt: Program) -> None:
    model = gpt.build()[0]
    model.blocks[1].feed = (line for line in "ab")

    with pytest.raises(CaptureError, match=r"blocks\.1\.feed is a builtins\.generator"):
        find(model, token_loss, gpt.batches(1)[0])


def test_locks_and_references_in_circles_are_no_obstacle(gpt: Program) -> None:
    def built() -> nn.Module:
        model = gpt.build()[0]
        model.lock, model.itself = threading.Lock(), [model]
        return model

    batch = gpt.batches(1)[0]

    assert find(built(), token_loss, batch) == find(built(), token_loss, batch)


def test_an_edit_of_a_helper_invalidates_what_was_captured(user: Any, tmp_path: Path) -> None:
    batch = {"x": torch.zeros(2, 3)}
    plans = PlanCache(tmp_path / "plans")
    key = find(user.Scaled(), user.loss, batch)

    def make() -> int:
        return len(capture(user.Scaled(), user.loss, batch).nodes)

    made = plans.value(key, make, sources)
    unedited = plans.load(key)
    (tmp_path / "a_helper.py").write_text(HELPER.replace("SCALE = 2.0", "SCALE = 5.0"))

    assert unedited == made
    assert plans.load(key) is None


_IN_ANOTHER_PROCESS = """
import torch, a_model
from sbp_torch.capture import fingerprint as module
from sbp_torch.capture.fingerprint import fingerprint
module.compiler_digest = lambda: "this compiler"
model = a_model.Scaled()
optimizer = torch.optim.AdamW(model.parameters())
print(fingerprint(model, a_model.loss, {"x": torch.zeros(2, 3)}, optimizer))
"""


def test_the_fingerprint_is_the_same_in_another_process(
    user: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "compiler_digest", lambda: "this compiler")
    model = user.Scaled()
    here = find(model, user.loss, {"x": torch.zeros(2, 3)}, torch.optim.AdamW(model.parameters()))
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(tmp_path)}

    there = subprocess.run(
        [sys.executable, "-c", _IN_ANOTHER_PROCESS],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert there.stdout.strip() == here


def test_the_example_in_the_docstring_holds() -> None:
    failed, attempted = doctest.testmod(fingerprint)

    assert (failed, attempted) == (0, 6)
