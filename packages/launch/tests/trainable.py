"""A plugin that can be trained with sbp-core alone: a tiny language model, its data, a planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from sbp_core import infer_strategy
from sbp_core.boxing import StepKind
from sbp_core.graph.ir import LogicalGraph, Node, OutputKind, Phase, Ref
from sbp_core.planning import PlanRequest
from sbp_core.plugins import Factory, PluginRegistry, discover, hookimpl
from sbp_core.plugins.discovery import PluginSource
from sbp_core.plugins.kinds import GraphPass
from sbp_core.strategy import Strategy
from sbp_launch.compile_config import CompileConfig
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.moves import MoveTime
from sbp_launch.planning.rows import ModuleMove, ModuleRow
from sbp_launch.run.run import Run
from sbp_launch.settings.config import EvaluateConfig, PluginChoice, RunConfig, TrainerConfig
from sbp_launch.step.training_step import TrainingStep
from sbp_launch.trainer.evaluation import Evaluator
from sbp_launch.trainer.planned import planner_of, whole_example
from sbp_launch.trainer.run_program import RunProgram, make_program
from sbp_launch.trainer.trainer import make_step
from sbp_torch.boxing.local import LocalBackend

SBP_API_VERSION = 1

#: Settings of a trainer that does nothing but train.
QUIET: Mapping[str, object] = {
    "evaluate": EvaluateConfig(batches=0),
    "sample_tokens": 0,
    "plan_rows": 0,
    "compare_steps": 0,
}


class FakeClock:
    """A clock that goes on by a second whenever somebody looks, and when told so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Bigram(nn.Module):
    """Predicts a token from the one before."""

    context = 4

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.head = nn.Linear(6, 8)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.embed(tokens)))

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.logits(batch["tokens"])
        return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


class Wide(nn.Module):
    """Residual blocks whose parameters are far larger than their activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(3)]
        )
        self.head = nn.Linear(32, 4)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.first(batch["x"])
        for block in self.blocks:
            x = x + block(x)
        return (self.head(x) - batch["wanted"]).square().mean()


class Rows:
    """Random rows, and some of their elements to be found again."""

    def num_samples(self, split: str = "train") -> int:
        return 1000

    def samples(self, numbers: npt.NDArray[np.int64], split: str = "train") -> dict[str, Tensor]:
        seeded = torch.Generator().manual_seed(int(split == "validation"))
        x = torch.randn(1000, 6, generator=seeded, dtype=torch.float64)[numbers]
        return {"x": x, "wanted": x[:, :4].contiguous()}

    def describe(self) -> str:
        return "rows"


class Counting:
    """Sequences that count up modulo eight."""

    vocabulary = 8

    def num_samples(self, split: str = "train") -> int:
        return 8

    def samples(self, numbers: npt.NDArray[np.int64], split: str = "train") -> dict[str, Tensor]:
        start = torch.from_numpy(numbers)[:, None] + (split == "validation")
        tokens = (start + torch.arange(5)) % 8
        return {"tokens": tokens[:, :4].contiguous(), "targets": tokens[:, 1:].contiguous()}

    def describe(self) -> str:
        return "counting"

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 8 for letter in text]

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(str(token) for token in tokens)


class Planner:
    """Splits the batch over every axis but `pipe`."""

    def plan(self, request: PlanRequest) -> Strategy:
        pins = {"batch": "S(0)", "use:batch": "S(0)", "activations": "S(0)", "parameters": "B"}
        return infer_strategy(request, planner="even", pins=pins)


class Megatron:
    """Splits the first matrix of each block by columns and the second by rows."""

    def plan(self, request: PlanRequest) -> Strategy:
        pins = {"batch": "B", "use:batch": "B", "parameters": "B", "optimizer_states": "B"}
        for use in ("", "use:"):
            pins |= {f"{use}blocks.*.0.weight*": "S(0)", f"{use}blocks.*.2.weight*": "S(1)"}
            pins |= {f"{use}blocks.*.0.bias*": "S(0)"}
        return infer_strategy(request, planner="megatron", pins=pins | {"blocks.*.1.*": "S(1)"})


class Choosing:
    """Takes the most micro-batches that there may be, if there is a choice."""

    chooses_variants = True

    def plan(self, request: PlanRequest) -> Strategy:
        family = request.family
        assert family is not None, "a step has variants"
        variant = replace(family.variant, num_micro_batches=max(family.micro_batches))
        chosen = request.of(variant)
        strategy = infer_strategy(chosen, planner="choosing", pins={"batch": "S(0)"})
        return replace(strategy, variant=variant)


class Sharding:
    """Splits the batch and all states over the ranks."""

    def plan(self, request: PlanRequest) -> Strategy:
        words = ("batch", "use:batch", "activations", "parameters", "optimizer_states")
        pins = dict.fromkeys((*words, "gradients", "updates"), "S(0)")
        return infer_strategy(request, planner="sharding", pins=pins)


def make_choosing(config: object) -> Choosing:
    return Choosing()


def make_model(config: object) -> Bigram:
    return Bigram()


def make_wide(config: object) -> Wide:
    return Wide()


def make_rows(config: object) -> Rows:
    return Rows()


def make_sharding(config: object) -> Sharding:
    return Sharding()


def make_megatron(config: object) -> Megatron:
    return Megatron()


def make_data(config: object) -> Counting:
    return Counting()


def make_planner(config: object) -> Planner:
    return Planner()


@hookimpl
def sbp_models() -> Mapping[str, Factory]:
    return {
        "bigram": Factory(build="trainable:make_model"),
        "wide": Factory(build="trainable:make_wide"),
    }


@hookimpl
def sbp_datasets() -> Mapping[str, Factory]:
    return {
        "counting": Factory(build="trainable:make_data"),
        "rows": Factory(build="trainable:make_rows"),
    }


def make_doubling(config: object) -> GraphPass:
    """Return a pass that doubles the loss, by adding it to itself."""

    def double(graph: LogicalGraph) -> LogicalGraph:
        old = graph.loss
        twice = Node(
            name="twice",
            op="aten.add.Tensor",
            args=(Ref(old), Ref(old)),
            outputs=("twice",),
            tags=("pointwise",),
        )
        last = max(i for i, node in enumerate(graph.nodes) if old in node.outputs)
        nodes = (*graph.nodes[: last + 1], twice, *graph.nodes[last + 1 :])
        return graph.with_nodes(
            nodes,
            outputs=tuple(
                replace(out, value="twice") if out.kind is OutputKind.LOSS else out
                for out in graph.outputs
            ),
            types={**graph.types, "twice": graph.types[old]},
        )

    return double


@hookimpl
def sbp_passes() -> Mapping[str, Factory]:
    return {"double": Factory(build="trainable:make_doubling")}


@hookimpl
def sbp_planners() -> Mapping[str, Factory]:
    return {
        "even": Factory(build="trainable:make_planner"),
        "choosing": Factory(build="trainable:make_choosing"),
        "sharding": Factory(build="trainable:make_sharding"),
        "megatron": Factory(build="trainable:make_megatron"),
    }


def registry() -> PluginRegistry:
    """Return core's and launch's own plugins, and those of this module."""
    return discover(
        [
            PluginSource(name=name, value=module, distribution=name)
            for name, module in (
                ("sbp-core", "sbp_torch.plugin"),
                ("sbp-launch", "sbp_launch.plugin"),
                ("trainable", "trainable"),
            )
        ],
        strict=True,
    )


def run_of(config: RunConfig) -> Run:
    """Return a run that prints nothing and keeps nothing."""
    return Run(config=config, registry=registry())


def run_config(
    mesh: tuple[int, ...] = (2,),
    axes: tuple[str, ...] = ("data",),
    plugins: tuple[str, ...] = (),
    **trainer: object,
) -> RunConfig:
    """Return a small run on the reference runtime."""
    settings = {
        "steps": 3,
        "batch_size": 4,
        "evaluate": EvaluateConfig(batches=1),
        "sample_tokens": 3,
        **trainer,
    }
    return RunConfig(
        model=PluginChoice(name="bigram"),
        data=PluginChoice(name="counting"),
        cluster=PluginChoice(name="local", settings={"mesh": mesh, "axes": axes}),
        boxing=PluginChoice(name="local"),
        runtime=PluginChoice(name="reference"),
        planner=PluginChoice(name="even"),
        optimizer=PluginChoice(name="adamw"),
        logger=PluginChoice(name="jsonl"),
        trainer=TrainerConfig(**settings),
        compile=CompileConfig(plugins=plugins, prove=not plugins),  # "double" changes the loss
        mesh=mesh,
        axes=axes,
    )


def planned(**trainer: object) -> Planned:
    """Return the plan of a small run."""
    run = run_of(run_config(**trainer))
    return plan_step(run, make_program(run))


def row(module: str, *, moved: int = 0, stage: int = 0, **fields: object) -> ModuleRow:
    """Return a row of the plan's table, with boxing if something is moved."""
    move = ModuleMove(
        when=MoveTime.AFTER,
        phase=Phase.FORWARD,
        what="output",
        kind=StepKind.ALL_REDUCE,
        how="over data: P -> B",
        sent_bytes=2 * moved,
        num_ranks=2,
    )
    known: dict[str, object] = {"parameters": (("weight", "(B)"),), "output": "(S(0))"}
    return ModuleRow(
        stage=stage,
        module=module,
        is_parent=not module,
        moves=(move,) if moved else (),
        **{**known, **fields},
    )


def plan_step(run: Run, program: RunProgram) -> Planned:
    """Return the checked and proved plan of a run."""
    planner = planner_of(run, program)
    planned = planner.plan()
    planner.check_fits(planned)
    return planner.add_proof(planned, whole_example(run, program))


def step_of(run: Run, program: RunProgram) -> TrainingStep:
    """Return the planned step of a run, whose ranks are threads."""
    return make_step(run, program, LocalBackend()).step


def held_out_loss(run: Run, program: RunProgram, step: TrainingStep) -> float:
    """Return the mean loss over held-out data of what a step has trained."""
    return Evaluator(run, program, step).metrics()["held_out_loss"]
