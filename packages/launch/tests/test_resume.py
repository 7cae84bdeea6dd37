"""A run that stops and goes on is the run that never stopped, bit for bit."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved_states import STATES, pieces_of, save, save_whole, states_of_run
from torch import Tensor
from trainable import QUIET, registry, run_config

from sbp_core.errors import ConfigError, SbpError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp
from sbp_launch.checkpoint import Checkpoint, LocalStorage
from sbp_launch.checkpoint.command.app import main
from sbp_launch.checkpoint.manifest import DamagedError, Metadata
from sbp_launch.checkpoint.objects import FsspecStorage
from sbp_launch.checkpoint.places import find_checkpoints, newest_first
from sbp_launch.checkpoint.saving import Processes
from sbp_launch.checkpoint.settings import CheckpointConfig
from sbp_launch.checkpoint.steps import step_name
from sbp_launch.settings.budget import ScheduleConfig
from sbp_launch.settings.config import EvaluateConfig, PluginChoice, RunConfig
from sbp_launch.trainer import loop, trainer
from sbp_launch.trainer.resume import Resume
from sbp_torch.update_options import UpdateOptions


def config(**changes: object) -> RunConfig:
    """Return a run whose learning rate falls over 6 steps, with averages of the parameters."""
    trainer_settings = {
        "schedule": ScheduleConfig(decay="linear", warmup_steps=2),
        "update": UpdateOptions(clip_norm=1.0, ema_decay=0.9),
        **QUIET,
        **{name: value for name, value in changes.items() if name != "mesh"},
    }
    mesh = changes.get("mesh", (2,))
    return run_config(mesh, ("data", "tensor")[: len(mesh)], steps=6, **trainer_settings)


def stopped(run: RunConfig, folder: Path, steps: int) -> None:
    """Train the first steps of a run, as if it had been stopped after them."""
    with pytest.MonkeyPatch.context() as patch:
        at = loop.stop_together

        def stopping(*given: object) -> list[int]:
            found = at(*given)
            taken.append(None)
            if len(taken) == steps:
                raise KeyboardInterrupt
            return found

        taken: list[None] = []
        patch.setattr(loop, "stop_together", stopping)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(run, registry(), folder)


def resumed(run: RunConfig, where: str | Path = "auto") -> RunConfig:
    return replace(run, trainer=replace(run.trainer, resume=str(where)))


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() and one
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_stopped_and_resumed_is_the_unbroken_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config()
    trainer.train(run, registry(), tmp_path / "whole")
    stopped(run, tmp_path / "parts", 2)

    trainer.train(resumed(run), registry(), tmp_path / "parts")

    assert_equal(states_of_run(tmp_path / "parts"), states_of_run(tmp_path / "whole"))
    out = capsys.readouterr().out
    assert "continuing after step 2, from checkpoints/step-00000002" in out
    assert "other than in" not in out
    kept = newest_first(LocalStorage(tmp_path / "parts" / "checkpoints"))
    assert kept == [step_name(6), step_name(2)]
    assert main(["diff", str(tmp_path / "whole"), str(tmp_path / "parts"), "--all"]) == 0
    assert "setting" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_ends_with_its_checkpoint_and_how_it_trains_further(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    ends = (
        "saved: checkpoints/step-00000006\n"
        "  to continue: sbp-train resume=run trainer.steps=MORE\n"
        f"run folder: {folder}\n"
    )
    run = config()

    trainer.train(run, registry(), folder)
    assert capsys.readouterr().out.endswith(ends)
    trainer.train(resumed(run), registry(), folder)

    out = capsys.readouterr().out
    assert "trainer.steps=6 is reached: there is no step to take\n" in out
    assert out.endswith(ends)


@pytest.mark.slow
def test_a_run_goes_on_from_another_folder_and_on_another_mesh(tmp_path: Path) -> None:
    run = config(dtype="float64")
    trainer.train(run, registry(), tmp_path / "whole")
    stopped(run, tmp_path / "first", 3)
    other = config(dtype="float64", mesh=(2, 2))

    trainer.train(resumed(other, tmp_path / "first"), registry(), tmp_path / "second")

    found = states_of_run(tmp_path / "second")
    for name, value in states_of_run(tmp_path / "whole").items():
        assert (found[name] - value).abs().max().item() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("by_way_of", [[], ["dcp"], ["hf", "safetensors"]])
def test_a_run_goes_on_from_a_checkpoint_that_was_converted(
    tmp_path: Path, by_way_of: list[str]
) -> None:
    run = config()
    trainer.train(run, registry(), tmp_path / "whole")
    stopped(run, tmp_path / "first", 3)
    source = tmp_path / "first"
    for form in (*by_way_of, "sbp"):
        names = {"safetensors": "x.safetensors", "sbp": "step-00000003"}
        target = tmp_path / names.get(form, form)
        assert main(["convert", str(source), str(target), "--to", form, "--all"]) == 0
        source = target

    trainer.train(resumed(run, source), registry(), tmp_path / "second")

    assert_equal(states_of_run(tmp_path / "second"), states_of_run(tmp_path / "whole"))


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_whose_modules_were_wrapped(tmp_path: Path) -> None:
    run = config()
    trainer.train(run, registry(), tmp_path / "whole")
    stopped(run, tmp_path / "first", 3)
    wrapped = tmp_path / "step-00000003"
    renames = ["--rename", "embed.=embed._orig_mod.", "--rename", "head.=module.head."]
    command = ["convert", str(tmp_path / "first"), str(wrapped), "--to", "sbp", "--all", *renames]
    assert main(command) == 0
    names = Checkpoint(LocalStorage(tmp_path), wrapped.name).names
    assert {"embed._orig_mod.weight.exp_avg", "module.head.weight.ema"} <= {*names}

    trainer.train(resumed(run, wrapped), registry(), tmp_path / "second")

    assert_equal(states_of_run(tmp_path / "second"), states_of_run(tmp_path / "whole"))


def test_a_path_is_that_of_a_run_of_its_checkpoints_or_of_one(tmp_path: Path) -> None:
    save_whole(tmp_path / "run" / "checkpoints", "step-00000009")
    save_whole(tmp_path / "run" / "checkpoints", "step-00000010")

    for path, names in (
        ("run", ["step-00000010", "step-00000009"]),
        ("run/checkpoints", ["step-00000010", "step-00000009"]),
        ("run/checkpoints/step-00000009", ["step-00000009"]),
    ):
        storage, found = find_checkpoints(tmp_path / path)
        assert found == names
        assert storage.place() == str(tmp_path / "run" / "checkpoints")
    objects = FsspecStorage(f"memory:/{tmp_path}/objects")
    pieces = pieces_of(STATES, Placement([0], ("rank",)), NdSbp(B))
    save(objects, "step-00000004", pieces)
    for url in (f"memory:/{tmp_path}/objects", f"memory:/{tmp_path}/objects/step-00000004"):
        there, found = find_checkpoints(url)
        assert found == ["step-00000004"]
        with Checkpoint(there, found[0]) as checkpoint:
            checkpoint.verify()
            assert torch.equal(
                checkpoint.part("weight", [(1, 3), (2, 9)]), STATES["weight"][1:3, 2:9]
            )
    with pytest.raises(ConfigError, match="there is no checkpoint at"):
        find_checkpoints(f"memory:/{tmp_path}/objects/step-00000005")
    with pytest.raises(ConfigError, match="there is no folder"):
        find_checkpoints(tmp_path / "walk")
    with pytest.raises(ConfigError, match="there is no checkpoint in"):
        find_checkpoints(tmp_path)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config(checkpoint=CheckpointConfig(every=2))
    trainer.train(run, registry(), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    path = tmp_path / "parts" / "checkpoints" / step_name(6) / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)

    with pytest.raises(DamagedError, match=r"step-00000006 is damaged: the xxh3_128 of tensor '"):
        trainer.train(resumed(run, path.parent), registry(), tmp_path / "refused")
    trainer.train(resumed(run, tmp_path / "parts"), registry(), tmp_path / "elsewhere")
    trainer.train(resumed(run), registry(), tmp_path / "parts")

    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    warning = r"warning: the checkpoint step-00000006 is damaged: .*this checkpoint is skipped"
    assert re.search(f"{warning}.*{warning}", out)
    assert out.count("continuing after step 4") == 2
    for folder in ("elsewhere", "parts"):
        assert_equal(states_of_run(tmp_path / folder), states_of_run(tmp_path / "whole"))


@pytest.mark.slow
def test_a_manifest_that_is_cut_is_skipped_too_and_without_any_that_is_whole_nothing_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config(checkpoint=CheckpointConfig(every=3))
    trainer.train(run, registry(), tmp_path)
    manifests = sorted((tmp_path / "checkpoints").glob("*/manifest.json"))
    manifests[1].write_bytes(manifests[1].read_bytes()[:-40])

    trainer.train(resumed(run), registry(), tmp_path)

    assert "continuing after step 3" in capsys.readouterr().out
    for manifest in manifests:
        manifest.write_bytes(b"")
    with pytest.raises(ConfigError, match="none of the 2 checkpoints is whole"):
        trainer.train(resumed(run), registry(), tmp_path)


def agreed(tmp_path: Path, cut: Mapping[int, Collection[int]]) -> list[tuple[str, list[str]]]:
    """Return what two processes, each with a disk of its own, go on from, and what they warn of.

    Args:
        tmp_path: For the disks.
        cut: The steps of checkpoints whose manifest is cut, by process.
    """
    barrier, texts = threading.Barrier(2), dict[int, str]()

    def process(rank: int) -> tuple[str, list[str]]:
        def gather(text: str) -> list[str]:
            texts[rank] = text
            barrier.wait(20.0)
            found = [texts[one] for one in (0, 1)]
            barrier.wait(20.0)
            return found

        root = tmp_path / str(rank)
        storage = LocalStorage(root)
        pieces = pieces_of(STATES, Placement([0], ("rank",)), NdSbp(B))
        for step in (2, 4, 6):
            save(storage, step_name(step), pieces, Metadata(step=step, seed=0))
        for step in cut.get(rank, ()):
            (root / step_name(step) / "manifest.json").write_text("{}")
        warnings: list[str] = []
        run: Any = SimpleNamespace(
            config=config(), folder=root, say=lambda lines: None, warn=warnings.append
        )
        session: Any = SimpleNamespace(load_state_dict=dict)
        try:
            resume = Resume(run, storage, newest_first(storage))
            resume.agree(session, Processes(rank=rank, ranks=(0, 1), gather=gather))
        except SbpError as error:
            barrier.abort()
            return str(error), warnings
        return resume.states.checkpoint.name, warnings

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(process, (0, 1), timeout=60.0))


def test_a_manifest_that_one_process_finds_damaged_is_named_by_all_and_passed_over(
    tmp_path: Path,
) -> None:
    (first, told), (second, own) = agreed(tmp_path / "newest", {1: [6]})

    assert first == second == step_name(4)
    place = tmp_path / "newest" / "1" / step_name(6) / "manifest.json"
    assert len(told) == len(own) == 1
    assert told[0].startswith("rank 1 says: the manifest does not end in its checksum")
    assert str(place) in told[0] and str(place) in own[0]

    # Each has one of its own that is damaged.
    (first, told), (second, own) = agreed(tmp_path / "two", {1: [6], 0: [4]})
    assert first == second == step_name(2)
    assert [text.startswith("rank") for text in told] == [True, False]
    assert [text.startswith("rank") for text in own] == [False, True]


@pytest.mark.slow
def test_auto_without_a_checkpoint_says_that_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.train(resumed(config()), registry(), tmp_path)

    assert "starting at step 0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_is_over_has_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.train(config(), registry(), tmp_path)
    before = states_of_run(tmp_path)

    trainer.train(resumed(config(evaluate=EvaluateConfig(batches=1))), registry(), tmp_path)

    assert_equal(states_of_run(tmp_path), before)
    assert "held-out loss" in capsys.readouterr().out


@pytest.mark.slow
def test_another_seed_or_model_is_refused_before_it_is_planned_and_another_setting_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(config(), tmp_path, 2)

    with pytest.raises(ConfigError, match=r"saved with trainer\.seed=0, and this run has .*=7"):
        trainer.train(resumed(config(seed=7)), registry(), tmp_path)
    misfits = [
        (replace(config(), optimizer=PluginChoice(name="sgd")), r"it has no '.*buffer' \(and "),
        (config(update=UpdateOptions(clip_norm=1.0)), r"it has 'ema.count', too \(and 3 "),
        (
            config(dtype="float64"),
            r"'embed.weight' is float32 \(8, 6\) in it, and float64",
        ),
    ]
    for other, says in misfits:
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "make_step", None)
            with pytest.raises(ConfigError, match=f"fit this model and optimizer: {says}"):
                trainer.train(resumed(other), registry(), tmp_path)
    assert "other than in step-00000002: optimizer was adamw, and is sgd" in capsys.readouterr().out
    other = replace(
        config(batch_size=8, micro_batches=2, schedule=ScheduleConfig(decay="cosine")),
        optimizer=PluginChoice(name="adamw", settings={"lr": 0.5}),
    )
    trainer.train(resumed(other), registry(), tmp_path)

    told = [line for line in capsys.readouterr().out.splitlines() if "other than in" in line]
    assert told == [
        f"other than in step-00000002: {line}"
        for line in (
            "trainer.batch_size was 4, and is 8",
            "trainer.micro_batches was 1, and is 2",
            "trainer.schedule.decay was linear, and is cosine",
            "trainer.schedule.warmup_steps was 2, and is 0",
        )
    ]


@pytest.mark.slow
def test_checkpoints_come_every_so_many_steps_and_the_newest_are_kept(tmp_path: Path) -> None:
    for keep, kept in ((1, [6]), (2, [6, 4]), (0, [6, 4, 2])):
        folder = tmp_path / str(keep)
        run = config(checkpoint=CheckpointConfig(every=2, keep=keep))
        trainer.train(run, registry(), folder)

        storage = LocalStorage(folder / "checkpoints")
        assert newest_first(storage) == [step_name(step) for step in kept]
        for name in newest_first(storage):
            with Checkpoint(storage, name) as checkpoint:
                checkpoint.verify()


@pytest.mark.slow
def test_a_clock_that_is_set_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = iter(range(0, -(10**9), -(10**5)))
    monkeypatch.setattr("time.time", lambda: next(jumps))
    run = config(checkpoint=CheckpointConfig(every="1h", keep=0))

    trainer.train(run, registry(), tmp_path)

    assert newest_first(LocalStorage(tmp_path / "checkpoints")) == [step_name(6)]


@pytest.mark.slow
def test_what_a_folder_had_goes_when_there_is_a_new_checkpoint(tmp_path: Path) -> None:
    trainer.train(config(), registry(), tmp_path)
    shorter = replace(config(), trainer=replace(config().trainer, steps=3))

    trainer.train(shorter, registry(), tmp_path)

    assert newest_first(LocalStorage(tmp_path / "checkpoints")) == [step_name(3)]


def test_a_run_that_goes_on_is_compared_with_one_device_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(config(), tmp_path, 2)

    trainer.train(resumed(config(compare_steps=3)), registry(), tmp_path)

    told = re.search(r"over the first 3 steps: (\S+) \(", capsys.readouterr().out)
    assert told and float(told[1]) < 1e-5


@pytest.mark.slow
def test_runs_that_only_print_otherwise_do_not_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config()
    printing = {"compare_steps": 1, "sample_tokens": 3, "log_every": 1, "plan_rows": 5}
    trainer.train(run, registry(), tmp_path / "quiet")
    trainer.train(config(**printing), registry(), tmp_path / "loud")
    trainer.train(config(prefetch=0), registry(), tmp_path / "other")
    capsys.readouterr()

    assert main(["diff", str(tmp_path / "quiet"), str(tmp_path / "loud"), "--all"]) == 0
    assert "setting" not in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "quiet"), str(tmp_path / "other"), "--all"]) == 1
    assert "config_hash" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("every", "steps", "seconds"),
    [
        (100, 100, None),
        ("100", 100, None),
        ("90s", None, 90.0),
        ("10min", None, 600.0),
        ("1.5h", None, 5400.0),
        ("2 h", None, 7200.0),
        (None, None, None),
    ],
)
def test_how_often_is_a_number_of_steps_or_a_time(
    every: int | str | None, steps: int | None, seconds: float | None
) -> None:
    settings = CheckpointConfig(every=every)

    assert (settings.every_steps, settings.every_s) == (steps, seconds)


@given(st.one_of(st.integers(max_value=0), st.sampled_from(["", "0", "0min", "-1s", "5 m", "1d"])))
def test_what_is_neither_is_refused(every: int | str) -> None:
    with pytest.raises(ConfigError, match="is no number of steps and no time"):
        CheckpointConfig(every=every)
