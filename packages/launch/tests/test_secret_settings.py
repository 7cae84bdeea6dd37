"""No secret gets into a run folder, nor into what is printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainable import registry, run_config

from sbp_core.errors import ConfigError
from sbp_launch.apps.train import main
from sbp_launch.checkpoint.objects import FsspecStorage
from sbp_launch.run.environment import environment
from sbp_launch.secret_settings import refuse_secrets, without_secrets
from sbp_launch.trainer import trainer

SECRET = "wJalr/XUtn+FEMI"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://KEY:wJalr/XUtn@bucket/run", "s3://KEY:***@bucket/run"),
        ("s3://:p@ss@bucket/run", "s3://:***@bucket/run"),
        ("simplecache::ftp://me:abc@host:21/run", "simplecache::ftp://me:***@host:21/run"),
        ("https://host/run?sig=abc&part=1", "https://host/run?sig=***&part=1"),
        ("https://h/r?a=1&X-Amz-Signature=abc", "https://h/r?a=1&X-Amz-Signature=***"),
        ("storage.options.secret=abc", "storage.options.secret=***"),
        ("+callbacks.api_key=abc", "+callbacks.api_key=***"),
        ("--access-token=abc", "--access-token=***"),
        ("trainer.resume=s3://K:abc@b/r", "trainer.resume=s3://K:***@b/r"),
    ],
)
def test_a_secret_is_not_shown(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/run/step-00000100@2",
        "sftp://me@host:22/run",
        "http://localhost:9000/bucket/run@2",
        "https://host/run?part=1&signed=no",
        "trainer.tokens=100",
        "model.num_layers=2",
        "data.eos_token=</s>",
        "--seed=1",
        "a text: with marks @ and ://",
    ],
)
def test_what_holds_no_secret_is_shown_as_it_is(text: str) -> None:
    assert without_secrets(text) == text
    refuse_secrets({"storage": {"url": text}})


@given(st.text("abcXYZ0189/+=@:%-_", min_size=8))
def test_no_password_of_an_address_is_shown(password: str) -> None:
    # Digits and a slash are a port, and no password.
    shown = without_secrets(f"s3://key:x{password}@bucket/run")

    assert shown == "s3://key:***@bucket/run"


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"storage": {"options": {"secret": SECRET}}}, "storage.options.secret is a secret"),
        ({"storage": {"options": {"client": {"password": SECRET}}}}, "options.client.password"),
        ({"trainer": {"callbacks": [{"api_key": SECRET}]}}, r"trainer.callbacks\[0\].api_key"),
        ({"trainer": {"resume": f"s3://KEY:{SECRET}@b/r"}}, r"resume holds .*s3://KEY:\*\*\*@b/r"),
    ],
)
def test_settings_that_hold_a_secret_are_refused(settings: dict[str, object], place: str) -> None:
    with pytest.raises(ConfigError, match=place) as refused:
        refuse_secrets(settings)

    assert SECRET not in str(refused.value)
    assert "environment" in refused.value.todo


def test_a_setting_that_is_not_set_is_no_secret() -> None:
    refuse_secrets({"storage": {"options": {"secret": None, "token": ""}}})
    refuse_secrets({"storage": {"options": {"token": "google_default"}}})


def test_an_address_with_a_password_is_refused_wherever_it_is_given() -> None:
    with pytest.raises(ConfigError, match=r"memory://me:\*\*\*@run") as refused:
        FsspecStorage(f"memory://me:{SECRET}@run")

    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "argument", [f"storage.url=s3://KEY:{SECRET}@b/run", f"+storage.options.secret={SECRET}"]
)
def test_a_run_with_a_secret_is_refused_before_it_leaves_anything(
    argument: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    url = [] if "url" in argument else ["storage.url=memory://run"]
    arguments = ["storage=fsspec", *url, argument, f"hydra.run.dir={folder}"]
    monkeypatch.setattr(sys, "argv", ["sbp-train", *arguments])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
    assert SECRET not in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.slow
def test_no_file_of_a_run_holds_a_variable_that_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "DATABASE_URL", "LESS"):
        monkeypatch.setenv(name, SECRET)

    trainer.train(run_config((2,), ("data",), steps=3), registry(), tmp_path)

    files = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"environment.json", "plan.json", "metrics.jsonl", "manifest.json"} <= files.keys()
    assert [name for name, data in files.items() if SECRET.encode() in data] == []
    assert SECRET not in "".join(capsys.readouterr())


def test_secrets_of_a_command_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["own.py", f"--api-key={SECRET}", f"s3://K:{SECRET}@b"])

    assert environment(registry())["command"] == ["own.py", "--api-key=***", "s3://K:***@b"]
