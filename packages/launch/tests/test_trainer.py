import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from trainable import Bigram, registry, run_config

from sbp_core.errors import ConfigError
from sbp_core.runtime.reference import ReferenceSession
from sbp_core.update_options import UpdateOptions
from sbp_launch import planned, trainer
from sbp_launch.optimizers import optimizer_over
from sbp_launch.program import make_program
from sbp_launch.schedules import ScheduleConfig


def test_a_run_prints_plan_progress_evaluation_sample_and_deviation(tmp_path, capsys):
    trainer.train(run_config(), registry(), tmp_path)

    out = capsys.readouterr().out
    assert "bigram: 104 parameters; data: counting" in out
    assert "all-reduce (data)" in out
    assert "step 3/3" in out
    assert re.search(r"held-out loss: \d\.\d{4} \(1 batch\)", out)
    assert "a sample of text" in out
    deviation = re.search(r"first 3 steps: (\S+) \((\S+) relative\)", out)
    assert float(deviation[2]) < 1e-5


def test_the_trained_states_are_those_of_the_one_device_program(tmp_path):
    run = run_config(dtype="float64", micro_batches=2)
    program = make_program(run, registry())
    model = program.made.whole_model()
    optimizer = optimizer_over(program.make_optimizer, model)
    for index in range(3):
        optimizer.zero_grad()
        model.loss(program.data.batch(index, 4)).backward()
        optimizer.step()

    trainer.train(run, registry(), tmp_path)

    states = load_file(tmp_path / "states.safetensors")
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

    def interrupted(self, batch, scalars):
        if batch["tokens"][0, 0] == 2:
            raise KeyboardInterrupt
        return step(self, batch, scalars)

    monkeypatch.setattr(ReferenceSession, "step", interrupted)

    with pytest.raises(KeyboardInterrupt):
        trainer.train(run_config(), registry(), tmp_path)

    states = load_file(tmp_path / "states.safetensors")
    assert states["head.weight.step"].item() == 2


def test_two_runs_of_one_config_are_equal_bit_for_bit(tmp_path):
    for name in ("first", "second"):
        trainer.train(run_config(), registry(), tmp_path / name)

    first, second = (load_file(tmp_path / n / "states.safetensors") for n in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_evaluation_gives_the_loss_of_the_model_on_one_device(tmp_path):
    run = run_config(dtype="float64", eval_batches=2)
    program = make_program(run, registry())
    made = planned.plan_step(run, registry(), program)
    states = program.made.states(program.optimizer)

    found = trainer.evaluate(run, registry(), program, made, states)

    batches = [program.data.batch(index, 4, "validation") for index in range(2)]
    model = program.made.whole_model()
    expected = sum(model.loss(batch).item() for batch in batches) / 2
    assert found == pytest.approx(expected, abs=1e-12)


def test_held_out_loss_does_not_depend_on_the_micro_batches():
    losses = []
    for micro_batches in (1, 2):
        run = run_config(dtype="float64", eval_batches=2, micro_batches=micro_batches)
        program = make_program(run, registry())
        found = planned.plan_step(run, registry(), program)
        states = program.made.states(program.optimizer)
        losses.append(trainer.evaluate(run, registry(), program, found, states))

    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_planning_alone_prints_the_plan_and_trains_nothing(capsys):
    trainer.plan_only(run_config(), registry())

    out = capsys.readouterr().out
    assert "proved live and bounded" in out
    assert "step 1/" not in out


def test_a_backend_of_several_processes_is_refused_at_once(monkeypatch):
    from sbp_core.boxing.local import LocalBackend

    monkeypatch.setattr(LocalBackend, "spans_processes", True)

    with pytest.raises(ConfigError, match="boxing=local connects one process a rank"):
        trainer.make_backend(run_config(), registry())


def test_the_model_is_left_in_the_chosen_dtype():
    program = make_program(run_config(dtype="float64"), registry())

    assert isinstance(program.model, Bigram)
    assert {parameter.dtype for parameter in program.model.parameters()} == {torch.float64}


def test_graph_passes_of_plugins_are_applied(tmp_path):
    once, twice = (tmp_path / name for name in ("once", "twice"))

    trainer.train(run_config(compare_steps=0), registry(), once)
    trainer.train(run_config(compare_steps=0, plugins=("double",)), registry(), twice)

    first, second = (
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]
        for folder in (once, twice)
    )
    assert second == pytest.approx(2 * first)


def test_a_cached_plan_spares_the_next_start_all_planning(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = run_config(eval_batches=0)
    run = replace(run, compile=replace(run.compile, cache=True))

    trainer.train(run, registry(), tmp_path / "first")
    monkeypatch.setattr(planned, "capture", None)  # would be called to plan
    trainer.train(run, registry(), tmp_path / "second")

    first, second = (load_file(tmp_path / n / "states.safetensors") for n in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_choice_is_planned_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = run_config()
    run = replace(run, compile=replace(run.compile, cache=True))
    plans = []
    for trainer_config in (run.trainer, replace(run.trainer, micro_batches=2)):
        program = make_program(run, registry())
        found = planned.plan_step(replace(run, trainer=trainer_config), registry(), program)
        plans.append(found.plan)

    assert [plan.num_micro_batches for plan in plans] == [1, 2]


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
