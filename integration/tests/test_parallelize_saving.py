"""What a step of `parallelize` saves and loads, and what comes of it when that fails."""

from __future__ import annotations

import copy
import errno
import logging
import os
import pkgutil
import threading
from contextlib import contextmanager

import pytest
import torch
from plain_training import (
    LAYOUTS,
    assert_trained_alike,
    batch_of,
    eager_step,
    loss_of,
    make_model,
    make_optimizer,
)
from safetensors.torch import save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sbp_core.errors import ConfigError, RunError
from sbp_launch import parallelize
from sbp_launch.checkpoint import LocalStorage

SAVES = "sbp_launch.checkpoint.background"
CREATE = "sbp_launch.checkpoint.folder_storage._StagedLocal.create"


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


def test_a_model_gets_back_what_was_trained_whatever_wraps_its_layers(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).double()
    plain, deep = copy.deepcopy(model), copy.deepcopy(model)
    model[0] = checkpoint_wrapper(model[0])
    plain[1] = torch.compile(plain[1], backend="eager")
    eager = torch.optim.SGD(deep.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(8, 4, dtype=torch.double)

    def loss(model, batch):
        return model(batch).square().mean()

    with parallelize(model, loss, batch, optimizer, mesh=2, planner="manual/zero") as step:
        eager.zero_grad()
        loss(deep, batch).backward()
        eager.step()
        step(batch)
        step.save(tmp_path)
        found = step.model_state_dict()
        other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        step.copy_to(plain, other)

    assert found.keys() == deep.state_dict().keys()  # `checkpoint_wrapper` has a hook for it
    for name, wanted in deep.state_dict().items():
        torch.testing.assert_close(found[name], wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            dict(zip(found, plain.parameters(), strict=True))[name].detach(), wanted
        )
    for one, wanted in zip(plain.parameters(), deep.parameters(), strict=True):
        held = eager.state[wanted]["momentum_buffer"]
        torch.testing.assert_close(other.state[one]["momentum_buffer"], held)
    with parallelize(plain, loss, batch, other, mesh=2) as step:
        step.load_model(tmp_path)
        torch.testing.assert_close(step.model_state_dict()["0.weight"], found["0.weight"])


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
        torch.testing.assert_close(step.state_dict(), kept[0], rtol=0, atol=0)


def test_a_step_that_was_not_taken_has_no_states_where_what_it_loads_is_damaged(tmp_path):
    def start():
        model = make_model()
        return parallelize(model, loss_of, batch_of(0), make_optimizer(model), mesh=2)

    with start() as step:
        step(batch_of(0))
        step.save(tmp_path / "whole")
        step.save(tmp_path / "damaged")
        wanted = step.state_dict()
    path = tmp_path / "damaged" / "step-00000001" / "rank-00000.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    with start() as step:
        with pytest.raises(ConfigError, match="step-00000001 is damaged"):
            step.load(tmp_path / "damaged")
        with pytest.raises(RunError, match="this parallel step has no states"):
            step(batch_of(0))
        step.load(tmp_path / "whole")
        torch.testing.assert_close(step.state_dict(), wanted, rtol=0, atol=0)


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


@pytest.mark.slow(but=3)
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
        words = "folder no longer exists" if fault == "gone" else os.strerror(reason[fault])
        assert words in str(caught.value)
        assert str(disk) in str(caught.value)
        assert caught.value.todo == "make room, or save to another folder: step.save(FOLDER)"
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
            with pytest.raises(ConfigError, match="another run writes its checkpoints") as caught:
                step.save(tmp_path, wait=wait)
            assert caught.value.todo.endswith("save to another folder: step.save(FOLDER)")
            assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        step.save(tmp_path, wait=wait)
        step.finish_saving()
        with LocalStorage(tmp_path).claim():  # which is free again
            assert (tmp_path / "step-00000000").is_dir()


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
