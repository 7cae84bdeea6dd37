"""What `transformers` saves is trained on, and what was trained it loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forked import COMMANDS, run_command
from sbp_launch import parallelize

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

#: Sizes of a small model of each kind, and classes of its tokens.
SMALL = {
    "gpt2": {
        "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "llama": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 8, "tie_word_embeddings": False,
    },
}  # fmt: skip


def small(kind: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, vocab_size=32, use_cache=False, **SMALL[kind])
    return transformers.AutoModelForCausalLM.from_config(config)


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["tokens"]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten())


def called(folder: Path, *arguments: str) -> int:
    """Return the exit code of `sbp-checkpoint` in a folder."""
    return run_command([COMMANDS["sbp-checkpoint"], *arguments], folder)[0]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", SMALL)
def test_from_transformers_to_a_trained_model_and_back(kind: str, tmp_path: Path) -> None:
    theirs, ours = small(kind, seed=1), small(kind, seed=2)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="10kB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    batch = {"tokens": torch.arange(32).reshape(4, 8)}
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)

    with parallelize(ours, loss_of, batch, optimizer, mesh=2, planner="manual/zero") as step:
        step.load_model(tmp_path / "theirs")
        first = step(batch).loss
        trained = step.model_state_dict()
    torch.testing.assert_close(first, loss_of(theirs, batch))

    # What was trained goes back the same way: one file, then shards beside their config.
    model = small(kind, seed=3)
    model.load_state_dict(trained)
    model.save_pretrained(tmp_path / "trained")
    target = tmp_path / "back"
    target.mkdir()
    config = (tmp_path / "theirs" / "config.json").read_bytes()
    (target / "config.json").write_bytes(config)
    options = ("--to", "hf", "--max-shard-size", "10kB")
    assert called(tmp_path, "convert", "trained", "back", *options) == 0

    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        target, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (target / "config.json").read_bytes() == config
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, trained[name]), name
    assert called(tmp_path, "diff", "trained", "back") == 0
