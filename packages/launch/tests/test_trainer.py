import json
import re
from dataclasses import replace

import pytest
import torch
from saved_states import states_of_run
from trainable import Bigram, held_out_loss, plan_step, registry, run_config, run_of, step_of

from sbp_aten.pass_options import MixedPrecision, PassOptions
from sbp_core.errors import ConfigError
from sbp_core.memory import predict_memory
from sbp_launch.data import SampleOrder
from sbp_launch.optimizers import optimizer_over
from sbp_launch.planning.flow import regathering
from sbp_launch.planning.one_device import EagerReference
from sbp_launch.settings.budget import ScheduleConfig
from sbp_launch.settings.config import EvaluateConfig, PluginChoice
from sbp_launch.settings.patterns import check_patterns
from sbp_launch.step.forward import Mode, plan_forward
from sbp_launch.team import DEADLINE_S, vote_deadline_s
from sbp_launch.trainer import planned, trainer
from sbp_launch.trainer.planning_only import PlanningOnly
from sbp_launch.trainer.run_program import make_program, model_loss
from sbp_launch.trainer.session import make_backend
from sbp_torch.runtime.reference import ReferenceSession
from sbp_torch.update_options import UpdateOptions


def test_a_run_prints_plan_progress_evaluation_sample_and_deviation(tmp_path, capsys):
    trainer.train(run_config(), registry(), tmp_path)

    out = capsys.readouterr().out
    assert "bigram: 104 parameters; data: counting" in out
    assert "all-reduce of gradient over data: P -> B" in out
    assert "step 3/3" in out
    assert re.search(r"held-out loss: \d\.\d{4} \(1 batch\)", out)
    assert "a sample of text" in out
    assert re.search(r"capturing the step \.\.\. \d+\.\d s", out)
    assert "S(d) split along dim d" in out
    assert "memory of a rank at its peak" in out
    assert max(map(len, out.splitlines()[:-1])) <= 100
    for name in ("strategy.yaml", "strategy.json", "plan.json", "plan.txt", "memory.txt"):
        assert (tmp_path / name).stat().st_size
    deviation = re.search(r"first 3 steps: (\S+) \((\S+) relative\)", out)
    assert float(deviation[2]) < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_cluster_of_gpus_is_refused_before_anything_is_made_where_there_are_none(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(trainer, "make_program", lambda run: pytest.fail("the model is made"))
    gpus = PluginChoice(name="h100", settings={"gpus_per_node": 2})

    with pytest.raises(ConfigError, match="for GPUs, and PyTorch sees none") as caught:
        trainer.train(replace(run_config(), cluster=gpus), registry(), tmp_path / "run")

    assert "sbp-plan" in caught.value.todo
    assert not (tmp_path / "run").exists()


def test_the_trained_states_are_those_of_the_one_device_program(tmp_path):
    run = run_config(dtype="float64", micro_batches=2)
    program = make_program(run_of(run))
    model = program.made.whole_model()
    optimizer = optimizer_over(program.make_optimizer, model)
    for index in range(3):
        optimizer.zero_grad()
        batch = program.batch(program.cursor().advanced(4 * index), 4)
        model.loss(batch).backward()
        optimizer.step()

    trainer.train(run, registry(), tmp_path)

    states = states_of_run(tmp_path)
    for name, parameter in model.named_parameters():
        assert (states[name] - parameter).abs().max().item() < 1e-9
        assert states[f"{name}.step"].item() == 3


def test_metrics_of_every_step_are_logged(tmp_path):
    trainer.train(run_config(), registry(), tmp_path)

    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["loss"] > 0 and record["tokens_per_s"] > 0 for record in records)
    assert records[0]["lr"] > 0


def test_an_interrupted_run_keeps_its_states(tmp_path, monkeypatch):
    step = ReferenceSession.step

    def interrupted(self, batch, scalars, **named):
        if scalars["step"] == 2:
            raise KeyboardInterrupt
        return step(self, batch, scalars, **named)

    monkeypatch.setattr(ReferenceSession, "step", interrupted)

    with pytest.raises(KeyboardInterrupt):
        trainer.train(run_config(), registry(), tmp_path)

    states = states_of_run(tmp_path)
    assert states["head.weight.step"].item() == 2


def test_torn_states_do_not_take_the_place_of_an_interrupt(tmp_path, monkeypatch, capsys):
    def interrupted(self, batch, scalars, **named):
        self.is_partially_updated = True
        raise KeyboardInterrupt

    monkeypatch.setattr(ReferenceSession, "step", interrupted)

    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.train(run_config(), registry(), tmp_path)

    assert "the states belong to two steps" in "".join(caught.value.__notes__)
    assert "the states are not saved" in capsys.readouterr().out
    assert states_of_run(tmp_path) == {}


@pytest.mark.slow
def test_two_runs_of_one_config_are_equal_bit_for_bit(tmp_path):
    for name in ("first", "second"):
        trainer.train(run_config(), registry(), tmp_path / name)

    first, second = (states_of_run(tmp_path / n) for n in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_evaluation_gives_the_loss_of_the_model_on_one_device(tmp_path):
    run = run_config(dtype="float64", evaluate=EvaluateConfig(batches=1), seed=1)
    program = make_program(run_of(run))

    with step_of(run_of(run), program) as step:
        found = held_out_loss(run_of(run), program, step)

    begin = program.cursor("validation")
    assert begin.order == SampleOrder(num_samples=8)  # that of each run, whatever its seed
    batch = program.batch(begin, 4, "validation")  # half of the samples
    model = program.made.whole_model()
    assert found == pytest.approx(model.loss(batch).item(), abs=1e-12)


@pytest.mark.slow
def test_held_out_loss_does_not_depend_on_the_micro_batches():
    losses = []
    for micro_batches in (1, 2):
        run = run_config(
            dtype="float64", evaluate=EvaluateConfig(batches=2), micro_batches=micro_batches
        )
        program = make_program(run_of(run))
        with step_of(run_of(run), program) as step:
            losses.append(held_out_loss(run_of(run), program, step))

    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


@pytest.mark.slow
def test_planning_alone_prints_the_plan_and_trains_nothing(capsys):
    planning = PlanningOnly(run_config(), registry())

    planning.plan()
    planning.show()

    out = capsys.readouterr().out
    assert "cannot deadlock" in out
    assert "priced for cluster local: 2 cpu devices" in out
    assert "step 1/" not in out


def test_a_backend_of_several_processes_is_refused_at_once(monkeypatch):
    from sbp_torch.boxing.local import LocalBackend

    monkeypatch.setattr(LocalBackend, "spans_processes", True)

    with pytest.raises(ConfigError, match="boxing=local connects one process a rank"):
        make_backend(run_of(run_config()))


def test_the_model_is_left_in_the_chosen_dtype():
    program = make_program(run_of(run_config(dtype="float64")))

    assert isinstance(program.model, Bigram)
    assert {parameter.dtype for parameter in program.model.parameters()} == {torch.float64}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floating_batches_come_in_the_dtype_of_the_model(tmp_path, capsys, dtype):
    run = replace(
        run_config(dtype=dtype), model=PluginChoice(name="wide"), data=PluginChoice(name="rows")
    )

    trainer.train(run, registry(), tmp_path)

    batch = make_program(run_of(run)).example(4)
    assert {value.dtype for value in batch.values()} == {getattr(torch, dtype)}
    out = capsys.readouterr().out
    deviation = re.search(r"first 3 steps: (\S+) \((\S+) relative\)", out)
    assert float(deviation[2]) < (1e-5 if dtype == "float32" else 1e-13)
    assert "held-out loss" in out


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"regather": ("nosuch.*",)}, "compile.regather"),
        (
            {"passes": PassOptions(accumulate_addends=("hea.*",))},
            "compile.passes.accumulate_addends",
        ),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(settings, key):
    run = run_config()
    run = replace(run, compile=replace(run.compile, **settings))

    with pytest.raises(ConfigError, match=f"{key}: the pattern .* matches no parameter"):
        make_program(run_of(run))


def test_the_nearest_pattern_is_named():
    with pytest.raises(ConfigError, match=r"did you mean 'head\.\*'\?"):
        check_patterns("x", ["hea.*"], ["embed.weight", "head.weight"], "parameter")


def _reference_with(pairs):
    run = run_of(run_config())
    program = make_program(run)
    settings = planned.plan_settings(run, program)
    reference = EagerReference(program.model, model_loss, program.optimizer, settings, 0, {})
    reference.found, reference.losses = map(list, zip(*pairs, strict=True))
    return reference.verdict()


def test_the_verdict_names_the_step_whose_loss_is_no_number():
    nan = float("nan")

    later = _reference_with([(2.0, 2.5), (nan, 2.0), (1.0, 1.0)])
    at_once = _reference_with([(1.0, nan), (1.0, 1.0)])
    never = _reference_with([(2.0, 2.5), (1.0, 1.0)])

    assert later.startswith("largest deviation of the loss from one device over the first 1 step: ")
    assert "5.00e-01 (2.00e-01 relative)\nfrom step 2 on nothing can be compared" in later
    assert later.endswith("there the loss is nan on the ranks, 2.0 on one device")
    assert at_once.startswith("from step 1 on")
    assert at_once.endswith("1.0 on the ranks, nan on one device")
    assert never.endswith("over the first 2 steps: 5.00e-01 (2.00e-01 relative)")


@pytest.mark.slow
def test_graph_passes_of_plugins_are_applied(tmp_path):
    once, twice = (tmp_path / name for name in ("once", "twice"))

    trainer.train(run_config(compare_steps=0), registry(), once)
    trainer.train(run_config(compare_steps=0, plugins=("double",)), registry(), twice)

    first, second = (
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]
        for folder in (once, twice)
    )
    assert second == pytest.approx(2 * first)


def test_a_plan_says_what_it_needs():
    run = run_of(run_config())

    found = plan_step(run, make_program(run))

    assert found.memory == predict_memory(found.plan)


def test_evaluation_has_the_passes_of_training_and_leaves_the_model_as_it_was(tmp_path):
    run = run_config(plugins=("double",))
    program = make_program(run_of(run))
    program.model.head.eval()
    found = plan_step(run_of(run), program)

    example = program.example(2)
    evaluation = plan_forward(program.one_device, example, found.settings, found, Mode.EVALUATION)

    assert any(node.name == "twice" for node in evaluation.graph.nodes)
    assert (program.model.training, program.model.head.training) == (True, False)


def test_the_planner_may_say_what_is_gathered_again_unless_the_config_does():
    run = run_config()
    program = make_program(run_of(run))
    own = replace(plan_step(run_of(run), program).strategy, regather=("head.*",))
    told = replace(run, compile=replace(run.compile, regather=("embed.*",)))

    assert regathering(own, run.compile).regather == ("head.*",)
    assert regathering(own, told.compile).regather == ("embed.*",)


@pytest.mark.parametrize(("field", "names"), [("keep", ("hea", "mm")), ("lower", ("embeding",))])
def test_a_pattern_of_mixed_precision_that_matches_nothing_is_refused(field, names):
    run = run_config()
    passes = PassOptions(mixed_precision=MixedPrecision(**{field: names}))
    run = replace(run, compile=replace(run.compile, passes=passes))

    with pytest.raises(ConfigError, match=f"mixed_precision.{field}: the pattern '{names[0]}'"):
        plan_step(run_of(run), make_program(run_of(run)))


def test_the_update_clips_and_the_rate_is_scheduled(tmp_path):
    run = run_config(
        dtype="float64",
        update=UpdateOptions(fused=True, clip_norm=0.01),
        schedule=ScheduleConfig(decay="linear", warmup_steps=2),
    )

    trainer.train(run, registry(), tmp_path)

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["lr"] / records[1]["lr"] for record in records] == [0.5, 1.0, 1.0]
    assert all(record["grad_norm"] > 0.01 for record in records)


def test_data_without_what_the_model_asks_for_are_a_wrong_setting():
    config = run_config()
    model = replace(config.model, file="there/model/bigram.yaml")
    data = PluginChoice(name="rows", file="there/data/rows.yaml")
    run = run_of(replace(config, model=model, data=data))

    with pytest.raises(ConfigError, match="asks its batch for 'tokens'") as caught:
        plan_step(run, make_program(run))

    assert caught.value.where == (model.file, data.file)
    assert "x float32 (4, 6), wanted float32 (4, 4)" in caught.value.accepted


@pytest.mark.parametrize(
    ("settings", "index", "deadline_s"),
    [
        ({"deadline_s": 7.0}, 3, 7.0),
        ({"deadline_s": 7.0}, 2, DEADLINE_S),  # the first rank compares
        ({}, 3, DEADLINE_S),
    ],
)
def test_behind_a_step_ranks_wait_as_long_as_in_it(settings, index, deadline_s):
    run = replace(run_config(), runtime=PluginChoice(name="actor", settings=settings))

    assert vote_deadline_s(run, index) == deadline_s
