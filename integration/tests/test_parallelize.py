"""`parallelize` with ranks as threads equals plain PyTorch, and refuses what cannot be meant."""

from __future__ import annotations

import copy
import errno
import io
import logging
import os
import pkgutil
import threading
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sbp_core.errors import ConfigError, RunError, SbpLookupError, SbpTypeError, SbpValueError
from sbp_core.strategy import Strategy
from sbp_launch import parallelize
from sbp_launch.checkpoint import LocalStorage
from sbp_torch.capture import UpdateOptions, counted_random
from sbp_torch.deferred_init import deferred

SIZE = 8
SAVES = "sbp_launch.checkpoint.background"
CREATE = "sbp_launch.checkpoint.local._StagedLocal.create"
LAYOUTS = (
    {},
    {"mesh": 2, "planner": "manual/zero"},
    {"mesh": (2, 2), "micro_batches": 2, "pins": {"0.weight": {"tensor": "S(0)"}}},
    {"mesh": 2, "axes": "pipe", "micro_batches": 4, "planner": {"name": "manual/pipeline"}},
    {"mesh": 2, "planner": {"name": "osdp", "memory_bytes": 1e6}, "runtime": "reference"},
)


def make_model(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Linear(6, 16),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.BatchNorm1d(16),
        nn.Linear(16, 4),
    )
    return nn.Sequential(*layers).double()


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)


def batch_of(index: int, size: int = SIZE) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    shapes = {"x": (size, 6), "y": (size, 4)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def loss_of(model, batch):
    error = (model(batch["x"]) - batch["y"]).square()
    return error.mean(), {"worst": error.amax()}


def eager_step(model, optimizer, batch, *, micro_batches=1, clip_norm=None, draw=0):
    """Take a step of plain PyTorch; return its loss."""
    optimizer.zero_grad()
    total = 0.0
    size = len(batch["x"]) // micro_batches
    for index in range(micro_batches):
        part = {name: value[index * size :][:size] for name, value in batch.items()}
        with counted_random(0, draw * micro_batches + index):
            loss = loss_of(model, part)[0] / micro_batches
        loss.backward()
        total += loss.item()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    return total


def assert_trained_alike(step, model, optimizer):
    """Compare every state of a parallel step with those of an eager model and optimizer."""
    own = copy.deepcopy(model)
    own_optimizer = make_optimizer(own)
    step.copy_to(own, own_optimizer)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(own.state_dict()[name], value, rtol=0, atol=1e-9)
    for parameter, twin in zip(model.parameters(), own.parameters(), strict=True):
        for key, value in optimizer.state[parameter].items():
            torch.testing.assert_close(own_optimizer.state[twin][key], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_loop_with_clipping_and_a_schedule_equals_plain_pytorch(layout):
    model, eager = make_model(), make_model()
    optimizer, eager_optimizer = make_optimizer(model), make_optimizer(eager)
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(one, T_max=6)
        for one in (optimizer, eager_optimizer)
    ]

    with parallelize(model, loss_of, batch_of(0), optimizer, clip_norm=0.5, **layout) as step:
        for index in range(4):
            found = float(step(batch_of(index)))
            wanted = eager_step(
                eager,
                eager_optimizer,
                batch_of(index),
                micro_batches=layout.get("micro_batches", 1),
                clip_norm=0.5,
            )
            for schedule in schedules:
                schedule.step()
            assert abs(found - wanted) <= 1e-9

        assert_trained_alike(step, eager, eager_optimizer)


def test_random_numbers_are_those_of_one_device():
    model, eager = make_model(dropout=0.5), make_model(dropout=0.5)
    eager_optimizer = make_optimizer(eager)

    with parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2) as step:
        for index in range(3):
            wanted = eager_step(eager, eager_optimizer, batch_of(index), draw=index)
            assert abs(step(batch_of(index)).item() - wanted) <= 1e-9


def test_an_output_is_its_loss_and_has_metrics():
    model = make_model()

    with parallelize(model, loss_of, batch_of(0), make_optimizer(model), clip_norm=1.0) as step:
        found = step(batch_of(0))

    loss, metrics = loss_of(make_model(), batch_of(0))
    assert float(found) == found.item() == found.loss.item() == pytest.approx(loss.item())
    assert found.metrics.keys() == {"worst", "grad_norm"}
    assert found.metrics["worst"].item() == pytest.approx(metrics["worst"].item())
    assert f"{found:.3f}" == f"{loss.item():.3f}"
    assert repr(found).startswith("StepOutput(loss=")


def test_the_learning_rate_can_be_an_argument():
    model, eager = make_model(), make_model()
    optimizer = make_optimizer(eager)

    with parallelize(model, loss_of, batch_of(0), make_optimizer(model)) as step:
        for index, rate in enumerate((0.0, 0.1)):
            optimizer.param_groups[0]["lr"] = rate
            eager_step(eager, optimizer, batch_of(index))
            step(batch_of(index), lr=rate)

        assert_trained_alike(step, eager, optimizer)


def test_one_rate_holds_for_all_groups_and_a_numbered_one_for_its_own():
    def grouped(model):
        groups = [{"params": list(layer.parameters())} for layer in (model[0], model[3], model[4])]
        return torch.optim.SGD(groups, lr=0.5)

    model, eager = make_model(), make_model()
    optimizer = grouped(eager)
    for group, rate in zip(optimizer.param_groups, (0.1, 0.1, 0.2), strict=True):
        group["lr"] = rate
    eager_step(eager, optimizer, batch_of(0))

    with parallelize(model, loss_of, batch_of(0), grouped(model)) as step:
        step(batch_of(0), **{"lr": 0.1, "lr.2": 0.2})
        found = step.model_state_dict()

    for name, value in eager.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)


def test_schedulers_do_not_warn_and_a_setting_that_changes_is_refused():
    model = make_model()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)

    with parallelize(model, loss_of, batch_of(0), optimizer) as step:
        step(batch_of(0))
        schedule.step()  # would warn, and warnings are errors here
        optimizer.param_groups[0]["weight_decay"] = 0.0
        with pytest.raises(SbpValueError, match="weight_decay of parameter group 0"):
            step(batch_of(0))


def test_a_scheduled_setting_follows_the_optimizer():
    model, eager = make_model(), make_model()
    optimizers = make_optimizer(model), make_optimizer(eager)
    update = UpdateOptions(scheduled=("weight_decay",))

    with parallelize(model, loss_of, batch_of(0), optimizers[0], update=update) as step:
        for index in range(2):
            for one in optimizers:
                one.param_groups[0]["weight_decay"] = 0.3 * index
            eager_step(eager, optimizers[1], batch_of(index))
            step(batch_of(index))

        assert_trained_alike(step, eager, optimizers[1])


@pytest.mark.parametrize("layout", LAYOUTS[1:3], ids=str)
def test_evaluation_takes_batches_of_any_size_and_changes_nothing(layout):
    model, eager = make_model(dropout=0.5), make_model(dropout=0.5)

    with parallelize(model, loss_of, batch_of(0), make_optimizer(model), **layout) as step:
        step(batch_of(0))
        before = step.state_dict()
        found = [float(step.evaluate(batch_of(7, size))) for size in (SIZE, 3, SIZE)]
        after = step.state_dict()
        step(batch_of(1))
        later = float(step.evaluate(batch_of(7)))
        step.copy_to(eager)

    assert all(torch.equal(before[name], after[name]) for name in before)
    assert found[0] == found[2] != later
    assert later == pytest.approx(loss_of(eager.eval(), batch_of(7))[0].item())
    assert model.training


def test_without_an_update_the_model_trains_and_nothing_changes():
    model = make_model()

    with parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2) as step:
        before = step.state_dict()
        with step.no_update():
            found = float(step(batch_of(3, size=5)))
        after = step.state_dict()

    assert found == pytest.approx(loss_of(make_model(), batch_of(3, size=5))[0].item())
    assert all(torch.equal(before[name], after[name]) for name in before)  # of batch norm, too


@pytest.mark.parametrize("kind", ["deferred", "meta"])
def test_a_model_without_memory_begins_with_its_own_values(kind):
    states = None
    if kind == "deferred":
        model = deferred(make_model, seed=0)
        optimizer = make_optimizer(model.model)
    else:
        with torch.device("meta"):
            model = make_model()
        optimizer, states = make_optimizer(model), make_model().state_dict()
    eager = make_model()
    eager_optimizer = make_optimizer(eager)

    with parallelize(model, loss_of, batch_of(0), optimizer, mesh=2, states=states) as step:
        eager_step(eager, eager_optimizer, batch_of(0))
        step(batch_of(0))

        assert_trained_alike(step, eager, eager_optimizer)


def test_what_was_saved_goes_on_on_another_mesh(tmp_path):
    def start(**layout):
        model = make_model(dropout=0.5)
        return parallelize(model, loss_of, batch_of(0), make_optimizer(model), **layout)

    with start(mesh=2, planner="manual/zero") as step:
        step(batch_of(0))
        step.save(tmp_path)
        wanted = float(step(batch_of(1)))

    with start(mesh=(2, 2)) as step:
        step.load(tmp_path)
        assert step.steps_done == 1
        assert abs(float(step(batch_of(1))) - wanted) <= 1e-9  # dropout draws what it would have
        assert step.steps_done == 2
    names = {path.name for path in tmp_path.iterdir()}
    assert {"step-00000001", "strategy.yaml", "plan.txt"} <= names
    with start() as step, pytest.raises(ConfigError, match="there is no folder"):
        step.load(tmp_path / "elsewhere")


def test_a_damaged_checkpoint_changes_nothing_and_the_one_before_it_is_loaded(tmp_path, caplog):
    model = make_model()
    with parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2) as step:
        kept = []
        for index in range(2):
            step(batch_of(index))
            step.save(tmp_path)
            kept.append(step.state_dict())
        path = tmp_path / "step-00000002" / "rank-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")

        with pytest.raises(ConfigError, match="step-00000002 is damaged: the xxh3_128 of tensor"):
            step.load(path.parent)

        assert step.steps_done == 2
        torch.testing.assert_close(step.state_dict(), kept[1], rtol=0, atol=0)
        step.load(tmp_path)
        assert "step-00000002 is damaged" in caplog.text
        assert step.steps_done == 1
        torch.testing.assert_close(step.state_dict(), kept[0], rtol=0, atol=0)
        (tmp_path / "step-00000001" / "manifest.json").write_text("{}")
        with pytest.raises(ConfigError, match="none of the 2 checkpoints is whole"):
            step.load(tmp_path)


def test_a_checkpoint_is_written_while_steps_run(tmp_path):
    def start(**layout):
        model = make_model()
        return parallelize(model, loss_of, batch_of(0), make_optimizer(model), **layout)

    with start(mesh=2) as step:
        step(batch_of(0))
        step.save(tmp_path, wait=False)
        states = [step.state_dict()]
        step(batch_of(1))
        step.save(tmp_path, wait=False)  # waits for the first if that is not there yet
        states.append(step.state_dict())
        step(batch_of(2))

    for done, wanted in enumerate(states, 1):
        with start() as step:
            step.load(tmp_path / f"step-{done:08d}")
            assert step.steps_done == done
            torch.testing.assert_close(step.state_dict(), wanted, rtol=0, atol=0)


def test_a_save_waits_for_the_one_before_and_logs_it(tmp_path, caplog, monkeypatch):
    logged, writing = threading.Event(), f"{SAVES}.write_part"
    write = pkgutil.resolve_name(writing)
    monkeypatch.setattr(writing, lambda *given: logged.wait(20.0) and write(*given))
    warn = logging.Logger.warning
    monkeypatch.setattr(logging.Logger, "warning", lambda *given: (warn(*given), logged.set()))
    model = make_model()
    with parallelize(model, loss_of, batch_of(0), make_optimizer(model)) as step:
        step.save(tmp_path, wait=False)
        step(batch_of(0))
        step.save(tmp_path)

    assert "waiting until the checkpoint step-00000000 is there" in caplog.text
    assert {"step-00000000", "step-00000001"} <= {path.name for path in tmp_path.iterdir()}


def test_what_cannot_be_written_beside_steps_is_raised_by_a_later_one(tmp_path, monkeypatch):
    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"{SAVES}.write_part", no_room)
    model = make_model()
    with parallelize(model, loss_of, batch_of(0), make_optimizer(model)) as step:
        step.save(tmp_path, wait=False)
        with pytest.raises(RunError, match="step-00000000 cannot be written: No space left"):
            for index in range(100):
                step(batch_of(index))
        step.save(tmp_path, wait=False)
        with pytest.raises(RunError, match="cannot be written: No space left"):
            step.finish_saving()
        step(batch_of(0))
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("wait", [True, False], ids=["between steps", "beside steps"])
@pytest.mark.parametrize("fault", ["full", "read-only", "gone"])
def test_a_disk_that_takes_no_more_is_named_and_the_last_checkpoint_stays(
    fault, wait, tmp_path, monkeypatch
):
    disk, away = tmp_path / "disk", tmp_path / "away"
    create = pkgutil.resolve_name(CREATE)
    reason = {"full": errno.ENOSPC, "read-only": errno.EROFS}

    @contextmanager
    def failing(self, file):
        with create(self, file) as opened:
            yield opened
            raise OSError(reason[fault], os.strerror(reason[fault]))

    model = make_model()
    with parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2) as step:
        step(batch_of(0))
        step.save(disk)
        wanted = step.state_dict()
        step(batch_of(1))
        with monkeypatch.context() as patch:
            patch.setattr(CREATE, moved_before(create, disk, away) if fault == "gone" else failing)
            with pytest.raises(RunError, match="step-00000002 cannot be written: ") as caught:
                step.save(disk, wait=wait)
                step.finish_saving()
        words = "folder has gone" if fault == "gone" else os.strerror(reason[fault])
        assert words in str(caught.value)
        assert str(disk) in str(caught.value)
        kept = away if fault == "gone" else disk
        assert [path.name for path in kept.glob("*step-*")] == ["step-00000001"]
        step.load(kept)
        torch.testing.assert_close(step.state_dict(), wanted, rtol=0, atol=0)
        step(batch_of(1))
        step.save(kept, wait=wait)
    assert {path.name for path in kept.glob("*step-*")} == {"step-00000001", "step-00000002"}


def moved_before(call, folder, target):
    """Return a function that moves a folder away before it calls another one."""

    def moved(self, file):
        if folder.exists():
            folder.rename(target)
        return call(self, file)

    return moved


@pytest.mark.parametrize("wait", [True, False], ids=["between steps", "beside steps"])
def test_a_folder_that_another_program_saves_to_is_refused(wait, tmp_path):
    model = make_model()
    with parallelize(model, loss_of, batch_of(0), make_optimizer(model)) as step:
        with LocalStorage(tmp_path).claim():
            with pytest.raises(ConfigError, match="another run writes its checkpoints"):
                step.save(tmp_path, wait=wait)
            assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        step.save(tmp_path, wait=wait)
        step.finish_saving()
        with LocalStorage(tmp_path).claim():  # which is free again
            assert (tmp_path / "step-00000000").is_dir()


def test_an_optimizer_that_has_stepped_goes_on():
    model, eager = make_model(), make_model()
    optimizers = make_optimizer(model), make_optimizer(eager)
    for one, optimizer in zip((model, eager), optimizers, strict=True):
        eager_step(one, optimizer, batch_of(0))
    before = copy.deepcopy((model.state_dict(), optimizers[0].state_dict()["state"]))

    with parallelize(model, loss_of, batch_of(0), optimizers[0], mesh=2) as step:
        eager_step(eager, optimizers[1], batch_of(1))
        step(batch_of(1))

        assert_trained_alike(step, eager, optimizers[1])
    now = model.state_dict(), optimizers[0].state_dict()["state"]
    torch.testing.assert_close(now, before, rtol=0, atol=0)  # the one-device program is as it was


def test_a_strategy_can_be_passed_and_is_reported():
    def start(**chosen):
        model = make_model()
        return parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2, **chosen)

    strategy = start(planner="manual/zero").strategy
    assert isinstance(strategy, Strategy)
    step, out = start(planner=strategy), io.StringIO()
    step.report(out)

    assert step.strategy is strategy
    assert "planner manual: 2 ranks, 1 micro-batch" in out.getvalue()
    assert "predicted time of a step" in out.getvalue()
    with pytest.raises(ConfigError, match="pins are given beside a strategy"):
        start(planner=strategy, pins={"batch": "B"})


def test_a_block_is_entered_once_and_states_are_there_afterwards():
    model = make_model()
    step = parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2)
    with pytest.raises(RunError, match="not started"):
        step(batch_of(0))
    with step:
        step(batch_of(0))
        with pytest.raises(RunError, match="started before"):
            step.start()
    after = step.state_dict()

    assert "0.weight" in after
    with pytest.raises(RunError, match="closed"):
        step(batch_of(0))
    with pytest.raises(RunError, match="started before"), step:
        pass


def test_an_error_in_the_block_ends_it_and_is_the_one_that_is_raised():
    model = make_model()
    step = parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2)

    with pytest.raises(KeyboardInterrupt), step:
        step(batch_of(0))
        raise KeyboardInterrupt

    with pytest.raises(RunError, match="closed"):
        step(batch_of(0))


def refused(match, error=ConfigError, **given):
    model = given.pop("model", None) or make_model()
    optimizer = given.pop("optimizer", None) or make_optimizer(model)
    batch = given.pop("batch", None) or batch_of(0)
    with pytest.raises(error, match=match) as caught:
        parallelize(model, loss_of, batch, optimizer, **given)
    return str(caught.value)


def test_what_cannot_be_meant_is_refused_before_anything_starts():
    refused("do not divide into micro_batches=3", micro_batches=3)
    refused("micro_batches=0", micro_batches=0)
    refused("batch_is='whole'", batch_is="whole")
    refused("mesh=0 has no ranks", mesh=0)
    refused("does not name the axes", mesh=(2, 2), axes=("data",))
    refused("4 axes without names", mesh=(1, 1, 1, 2))
    assert "did you mean 'osdp'" in refused("planner='osdpp'", planner="osdpp")
    refused("planner.memory_byte", planner={"name": "osdp", "memory_byte": 1})
    assert "set mesh=[4] axes=['data']" in refused("splits over", mesh=(2, 2), planner="osdp")
    refused("planner is of type NoneType", SbpTypeError, planner=None)
    refused("runtime is the class int", SbpTypeError, runtime=int)
    refused("has no name", cluster={"cores": 2})
    refused("which is an argument of its own", cluster={"name": "local", "mesh": [2]})
    refused("connects one process a rank", boxing="torch", mesh=2)
    refused("both given", clip_norm=1.0, update=UpdateOptions(clip_norm=2.0))
    refused("both given", autocast="bfloat16", compile={"autocast": "float16"})
    refused("autocast='int8'", autocast="int8")
    refused("compile.bucket_byte", compile={"bucket_byte": 1})
    refused("model is wrapped", SbpTypeError, model=nn.DataParallel(make_model()))
    other = make_optimizer(make_model())
    refused("a parameter that the model does not have", RuntimeError, optimizer=other)


def test_states_that_do_not_fit_are_refused():
    model = make_model()
    step = parallelize(
        model, loss_of, batch_of(0), make_optimizer(model), states={"0.wieght": torch.zeros(1)}
    )
    with pytest.raises(SbpLookupError, match="wieght"):
        step.start()
    with torch.device("meta"):
        model = make_model()
    step = parallelize(model, loss_of, batch_of(0), make_optimizer(model))
    with pytest.raises(SbpValueError, match="has no values"):
        step.start()


def test_a_batch_that_does_not_fit_says_what_to_do():
    model = make_model()
    with parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2) as step:
        with pytest.raises(SbpValueError, match="drop_last=True"):
            step(batch_of(0, size=3))
        with pytest.raises(SbpValueError, match="'y' is missing"):
            step({"x": batch_of(0)["x"]})
        with pytest.raises(SbpValueError, match="no scalar 'momentum'"):
            step(batch_of(0), momentum=0.5)
        with step.no_update(), pytest.raises(SbpValueError, match="leaves that out"):
            step(batch_of(0), lr=0.5)
        step(batch_of(0))  # none of that ended it


@pytest.mark.parametrize(
    ("environment", "mesh", "match"),
    [
        ({"RANK": "0", "WORLD_SIZE": "3"}, (2, 2), "4 ranks, and torchrun started 3 processes"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, 2, "torchrun started 2 processes"),
    ],
)
def test_the_world_of_processes_has_to_fit(monkeypatch, environment, mesh, match):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refused(match, mesh=mesh, boxing="local")


def words_loss(model, batch):
    return model(batch["words"]).square().mean()


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_a_step_that_fails_names_the_line_of_the_model(in_evaluation):
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    good = {"words": torch.zeros(4, dtype=torch.int64)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with (
        pytest.raises(RunError) as caught,
        parallelize(model, words_loss, good, optimizer, mesh=2) as step,
    ):
        (step.evaluate if in_evaluation else step)({"words": torch.full((4,), 7)})

    assert "module '0'" in caught.value.where[0] and "test_parallelize.py" in caught.value.where[0]
    assert isinstance(caught.value.__cause__, IndexError)


@pytest.mark.parametrize("layout", LAYOUTS[1:4:2], ids=str)
def test_a_step_starts_from_weights_of_a_file_as_plain_pytorch_does(layout, tmp_path):
    model, eager = make_model(), make_model()
    with torch.no_grad():
        for value in (*eager.parameters(), *eager.buffers()):
            value.add_(1)
    save_file(eager.state_dict(), tmp_path / "weights.safetensors")
    optimizer, eager_optimizer = make_optimizer(model), make_optimizer(eager)

    with parallelize(model, loss_of, batch_of(0), optimizer, **layout) as step:
        step.load_model(tmp_path / "weights.safetensors")
        for index in range(2):
            step(batch_of(index))
            micro_batches = layout.get("micro_batches", 1)
            eager_step(eager, eager_optimizer, batch_of(index), micro_batches=micro_batches)

        assert_trained_alike(step, eager, eager_optimizer)
        with pytest.raises(RunError, match="2 steps were taken"):
            step.load_model(tmp_path / "weights.safetensors")
