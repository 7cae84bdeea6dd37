"""Training that starts from weights in a file or folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from held import Held
from safetensors.torch import save_file
from torch import Tensor, nn
from trainable import Bigram, registry, run_config, run_of

from sbp_core.errors import ConfigError
from sbp_launch.checkpoint.formats.indexed import IndexedTensors
from sbp_launch.checkpoint.formats.writers import write_distributed_checkpoint, write_sharded
from sbp_launch.checkpoint.names import SHARED, model_names
from sbp_launch.checkpoint.places import look, open_tensors
from sbp_launch.checkpoint.starting_weights import StartingWeights, find_weights
from sbp_launch.checkpoint.tensors import LazyTensors
from sbp_launch.trainer import trainer
from sbp_launch.trainer.run_program import make_program
from sbp_torch.graph_capture import copied_states, initial_states, update
from sbp_torch.update_options import LossScaling, UpdateOptions


class Tied(nn.Module):
    """Two names of one parameter, a buffer that is kept, one that is not, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("positions", torch.arange(3.0), persistent=False)
        self.constant = torch.ones(2)


def weights(path: Path, model: nn.Module, options: UpdateOptions | None = None) -> StartingWeights:
    optimizer = torch.optim.AdamW(model.parameters())
    return find_weights(path, model, optimizer, options or UpdateOptions(), where="a test")


def saved(folder: Path, states: dict[str, Tensor]) -> Path:
    path = folder / "weights.safetensors"
    save_file({name: value.detach().clone() for name, value in states.items()}, path)
    return path


def other_bigram() -> Bigram:
    torch.manual_seed(7)
    return Bigram()


def in_one_file(folder: Path, states: dict[str, Tensor]) -> Path:
    return saved(folder, states)


def in_shards(folder: Path, states: dict[str, Tensor]) -> Path:
    write_sharded(folder / "hf", Held(states), max_shard_bytes=100)
    return folder / "hf"


def distributed(folder: Path, states: dict[str, Tensor]) -> Path:
    write_distributed_checkpoint(folder / "dcp", Held({f"model.{k}": v for k, v in states.items()}))
    return folder / "dcp"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("write", [in_one_file, in_shards, distributed])
def test_a_run_starts_from_the_weights_of_every_format(
    write: Callable[[Path, dict[str, Tensor]], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = other_bigram()
    path = write(tmp_path, dict(model.state_dict()))
    config = run_config(init_from=str(path), steps=2, dtype="float64")
    program = make_program(run_of(config))
    model.double()
    wanted = model.loss(program.batch(program.cursor(), 4)).item()

    trainer.train(config, registry(), tmp_path / "run")

    out = capsys.readouterr().out
    first = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0]
    found = re.search(r'"loss": ([\d.]+)', first)
    assert found is not None
    assert float(found[1]) == pytest.approx(wanted, rel=1e-12)
    assert f"starting from the weights in {path}" in out.replace("\n  ", " ").replace("\n", "")
    deviation = re.search(r"first 2 steps: (\S+) ", out)
    assert deviation is not None
    assert float(deviation[1]) < 1e-12


def test_a_rank_reads_only_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[tuple[str, list[int]]] = []
    read = IndexedTensors.part

    def noted(self: IndexedTensors, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        parts.append((name, [stop - start for start, stop in bounds]))
        return read(self, name, bounds)

    monkeypatch.setattr(IndexedTensors, "part", noted)
    path = saved(tmp_path, dict(other_bigram().state_dict()))
    config = run_config(init_from=str(path), steps=1, compare_steps=0, sample_tokens=0)

    trainer.train(
        config.__class__(**{**{n: getattr(config, n) for n in config.__slots__},
                            "planner": config.planner.__class__(name="sharding")}),
        registry(), tmp_path / "run",
    )  # fmt: skip

    sizes = dict(parts)
    assert sizes["embed.weight"] == [4, 6]  # half of the rows, by each of two ranks
    assert [name for name, _ in parts].count("embed.weight") == 2


def test_names_may_begin_otherwise_there_and_here(tmp_path: Path) -> None:
    inner = other_bigram()
    wrapped = nn.Module()
    wrapped.network = Bigram()

    found = weights(saved(tmp_path, dict(inner.state_dict())), wrapped)
    assert found.sources["network.head.weight"].names == ("head.weight",)

    longer = {f"module.model.{name}": value for name, value in inner.state_dict().items()}
    found = weights(saved(tmp_path, longer), inner)
    assert found.sources["head.weight"].names == ("module.model.head.weight",)


@pytest.mark.parametrize(
    "wrapper",
    ["module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"],
)
def test_what_wrappers_add_to_names_is_passed_over_there_and_here(
    wrapper: str, tmp_path: Path
) -> None:
    plain = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    wrapped = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Module()])})
    wrapped["layers"][1].add_module(wrapper, nn.Linear(2, 2))

    found = weights(saved(tmp_path, wrapped.state_dict()), plain)
    assert found.sources["layers.1.bias"].names == (f"layers.1.{wrapper}.bias",)
    assert found.sources["layers.0.bias"].names == ("layers.0.bias",)

    longer = {f"model.{name}": value for name, value in plain.state_dict().items()}
    found = weights(saved(tmp_path, longer), wrapped)
    assert found.sources[f"layers.1.{wrapper}.bias"].names == ("model.layers.1.bias",)

    both = {**plain.state_dict(), **wrapped.state_dict()}
    with pytest.raises(ConfigError, match=f"nothing called 'layers.1.{wrapper}"):
        weights(saved(tmp_path, both), plain)


class Scaled(nn.Module):
    """What PyTorch takes in other forms: a number, a vector of one, a counter, indices."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("order", torch.tensor([2, 300, 1]))


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("scale", torch.tensor([7.0]), torch.tensor(7.0)),
        ("norm.num_batches_tracked", torch.tensor([7]), torch.tensor(7)),
        ("norm.num_batches_tracked", torch.tensor(7.0), torch.tensor(7)),
        ("norm.num_batches_tracked", torch.tensor(7, dtype=torch.int32), torch.tensor(7)),
        ("norm.num_batches_tracked", None, torch.tensor(5)),
        ("order", torch.tensor([0, 1, 2], dtype=torch.uint8), torch.tensor([0, 1, 2])),
    ],
)
def test_other_forms_of_numbers_are_taken_as_pytorch_takes_them(
    name: str, given: Tensor | None, wanted: Tensor, tmp_path: Path
) -> None:
    model, plain = Scaled(), Scaled()
    for one in (model, plain):
        one.norm.num_batches_tracked.fill_(5)
    states = {key: value for key, value in Scaled().state_dict().items() if key != name}
    plain.load_state_dict(states if given is None else states | {name: given})

    found = weights(saved(tmp_path, states if given is None else states | {name: given}), model)

    options = UpdateOptions(ema_decay=0.9)
    optimizer = torch.optim.AdamW(model.parameters())
    with found.over(initial_states(model, optimizer, options)) as started:
        like = started.like(name) if isinstance(started, LazyTensors) else started[name]
        assert (started[name].dtype, like.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(started[name], wanted)
    assert torch.equal(plain.state_dict()[name], wanted)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("one", torch.tensor(1.0), r"shape \(\)"),
        ("scale", torch.tensor([1.0, 2.0]), r"shape \(2,\)"),
        ("order", torch.tensor([0.5, 1.0, 2.0]), "is of torch.float32"),
        ("order", torch.tensor([0.0, 1.0, float("nan")]), "is of torch.float32"),
        ("one", torch.tensor([1]), "is of torch.int64"),
        ("norm.running_var", None, "there is no 'norm.running_var'"),
    ],
)
def test_numbers_that_would_become_others_are_refused(
    name: str, given: Tensor | None, message: str, tmp_path: Path
) -> None:
    states = {key: value for key, value in Scaled().state_dict().items() if key != name}

    with pytest.raises(ConfigError, match=message):
        weights(saved(tmp_path, states if given is None else states | {name: given}), Scaled())


def test_states_of_the_optimizer_and_averages_begin_anew(tmp_path: Path) -> None:
    model, options = Bigram(), UpdateOptions(ema_decay=0.9)
    optimizer = torch.optim.AdamW(model.parameters())
    path = saved(tmp_path, {
        **other_bigram().state_dict(),
        "head.weight.exp_avg": torch.full((8, 6), 9.0),
        "head.weight.ema": torch.full((8, 6), 9.0),
        "ema.count": torch.tensor(3.0),
    })  # fmt: skip

    with weights(path, model, options).over(initial_states(model, optimizer, options)) as states:
        assert torch.equal(states["head.weight"], other_bigram().head.weight)
        assert torch.equal(states["head.weight.ema"], other_bigram().head.weight)
        assert torch.equal(states["head.weight.exp_avg"], torch.zeros(8, 6))
        assert states["ema.count"] == 0
        part = states.part("head.weight.ema", [(2, 4), (1, 3)])
        assert torch.equal(part, other_bigram().head.weight[2:4, 1:3])
        assert states.like("head.weight.exp_avg").shape == (8, 6)


def test_weights_take_the_dtype_of_the_model(tmp_path: Path) -> None:
    states = {name: value.bfloat16() for name, value in other_bigram().state_dict().items()}
    model = Bigram()

    found = weights(saved(tmp_path, states), model)

    with found.over(dict(model.state_dict())) as started:
        assert started["head.bias"].dtype == torch.float32
        assert torch.equal(started["head.bias"], states["head.bias"].float())


def test_tied_tensors_may_have_each_of_their_names(tmp_path: Path) -> None:
    model = Tied()
    states = {name: value + 1 for name, value in model.state_dict().items()}

    for left_out in ("head.weight", "embed.weight"):
        some = {name: value for name, value in states.items() if name != left_out}
        with weights(saved(tmp_path, some), model).over(dict(model.state_dict())) as started:
            assert torch.equal(started["embed.weight"], states["embed.weight"])

    with weights(saved(tmp_path, states), model).over(dict(model.state_dict())) as started:
        assert torch.equal(started["embed.weight"], states["embed.weight"])
    states["head.weight"] = states["head.weight"] + 1
    found = weights(saved(tmp_path, states), model)
    differ = pytest.raises(ConfigError, match="are one tensor in the model, and differ")
    with found.over(dict(model.state_dict())) as started, differ:
        started["embed.weight"]


def test_what_a_state_dict_leaves_out_is_taken_if_it_is_there(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    everything = initial_states(model, optimizer)
    assert {"positions", "constant"} <= everything.keys()

    found = weights(saved(tmp_path, everything), model)

    assert {"positions", "constant", "norm.running_mean", "embed.weight"} <= found.sources.keys()
    assert "positions" not in weights(saved(tmp_path, model.state_dict()), model).sources


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    """Return the states of a bigram with some changed, or left out."""
    found: dict[str, Any] = {**other_bigram().state_dict()}
    found |= {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (changed(head__bias=None), "there is no 'head.bias', which the model has"),
        (changed(head__bias=None, head__bais=torch.ones(8)),
         r"nothing called 'head.bais'(.*\n)*.*did you mean 'head.bias'\?"),
        (changed(more=torch.ones(1)), "the model has nothing called 'more'"),
        (changed(head__bias=torch.ones(9)), r"'head.bias' has shape \(9,\)\n.*\n.*\n.*: \(8,\)"),
        (changed(head__bias=torch.ones(8).int()), r"'head.bias' is of torch.int32"),
        (changed(embed__weight=None, head__weight=None, head__bias=None, x=torch.ones(1)),
         "nothing called 'x'"),
    ],
)  # fmt: skip
def test_names_and_shapes_that_do_not_fit_are_refused(
    states: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        weights(saved(tmp_path, states), Bigram())

    assert "a test" in caught.value.where
    assert str(tmp_path) in str(caught.value)


def test_a_run_whose_weights_do_not_fit_ends_before_it_plans(tmp_path: Path) -> None:
    path = saved(tmp_path, changed(head__bias=torch.ones(9)))

    with pytest.raises(ConfigError, match=r"trainer\.init_from"):
        trainer.train(run_config(init_from=str(path)), registry(), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"did you mean .*weights\.safetensors"):
        trainer.train(run_config(init_from=f"{path}s"), registry(), tmp_path / "run")

    assert not (tmp_path / "run" / "plan.json").exists()


@pytest.mark.slow
def test_a_run_starts_from_the_newest_checkpoint_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    trainer.train(run_config(), registry(), one)
    capsys.readouterr()

    trainer.train(run_config(init_from=str(one), steps=1), registry(), two)

    assert "starting from the weights in" in capsys.readouterr().out
    with open_tensors(look(one)) as before, open_tensors(look(two)) as after:
        assert set(before) == set(after)
        assert (before["head.bias.step"], after["head.bias.step"]) == (3, 1)


@pytest.mark.slow
def test_a_run_that_goes_on_does_not_start_from_weights_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, dict(other_bigram().state_dict()))
    trainer.train(run_config(init_from=str(path), steps=2), registry(), tmp_path / "run")
    capsys.readouterr()

    config = run_config(init_from=str(path), steps=3, resume="auto")
    trainer.train(config, registry(), tmp_path / "run")

    assert "starting from the weights" not in capsys.readouterr().out


def test_states_that_belong_to_no_parameter_are_known() -> None:
    model = Bigram()
    options = UpdateOptions(ema_decay=0.9, loss_scaling=LossScaling())
    states = initial_states(model, torch.optim.AdamW(model.parameters()), options)

    assert {update.SCALE, update.GROWTH, update.AVERAGED} == SHARED
    assert set(model_names(states)) == set(model.state_dict())


def test_copies_of_parameters_are_known_with_values_and_without() -> None:
    options = UpdateOptions(ema_decay=0.9)
    with torch.device("meta"):
        deferred = Bigram()

    for model in (Bigram(), deferred):
        found = copied_states(model, torch.optim.AdamW(model.parameters()), options)
        assert found["head.bias.ema"] == ("head.bias", torch.float32)
        assert found.keys() == {f"{name}.ema" for name, _ in model.named_parameters()}
