"""Collect the settings that a checkpoint keeps, and compare them when a run resumes from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from xxhash import xxh3_128_hexdigest

from sbp_launch.run.run import Run
from sbp_launch.settings.config import RunConfig


def settings_of(run: Run) -> dict[str, Any]:
    """Return, as JSON, the settings that a run should share with the run that it continues."""
    config, trainer = run.config, run.config.trainer
    values = {
        "model": _choice(config.model),
        "data": _choice(config.data),
        "optimizer": _choice(config.optimizer),
        "compile.autocast": config.compile.autocast,
        "compile.random": config.compile.random,
        "trainer.batch_size": trainer.batch_size,
        "trainer.micro_batches": trainer.micro_batches,
        "trainer.loss": trainer.loss,
        "trainer.micro_batches_per_update": trainer.micro_batches_per_update,
        "trainer.schedule": asdict(trainer.schedule),
        "trainer.update": asdict(trainer.update),
    }
    if trainer.schedule.decay != "constant":
        values["trainer.budget"] = asdict(trainer.budget)
    found: dict[str, Any] = json.loads(_text(values))
    return found


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting that has changed.

    If the plugin has changed, only its name is compared. Settings that only one run has, and
    derived settings (`trainer.micro_batches=auto`), are not compared.

    >>> differences({"data": {"name": "text", "seed": 0}}, {"data": {"name": "text", "seed": 1}})
    ['data.seed was 0, and is 1']
    """
    found = []
    for key in was.keys() & now.keys():
        before, after = was[key], now[key]
        if before == after or after == "auto":
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            if before.get("name") != after.get("name"):
                found.append(f"{key} was {before.get('name')}, and is {after.get('name')}")
            else:
                found += [f"{key}.{line}" for line in differences(before, after)]
        else:
            found.append(f"{key} was {_value_text(before)}, and is {_value_text(after)}")
    return sorted(found)


def _value_text(value: Any) -> str:
    text = value if value and isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def config_hash(config: RunConfig) -> str:
    """Return a hash of the settings of a run, without those of its output.

    The hash does not change when a run is stopped and resumed.
    """
    trainer = replace(
        config.trainer,
        resume=None,
        allow_other_data=False,
        overwrite=False,
        compare_steps=0,
        sample_tokens=0,
        log_every=1,
        plan_rows=0,
    )
    return hash_of(asdict(replace(config, trainer=trainer)))


def hash_of(value: Any) -> str:
    """Return a hash of a value of plain types."""
    return xxh3_128_hexdigest(_text(value).encode())


def _choice(choice: Any) -> dict[str, Any]:
    return {"name": choice.name, **choice.settings}


def _text(value: Any) -> str:
    # JSON has no infinities, but `norm_type` may be infinite.
    return json.dumps(_finite(value), sort_keys=True, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, float) and value - value != 0.0:
        return str(value)
    return value
