"""Refuse settings that contain secrets, because all settings are written to run folders.

Run folders are copied, shared and published. File systems, services and libraries can read
passwords and tokens from the environment, or from files of the user.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sbp_core.errors import ConfigError

#: Names of settings, query parameters and arguments whose values are secrets.
_NAMES = frozenset(
    {
        "password", "passwd", "passphrase", "secret", "token", "credential", "credentials",
        "api_key", "apikey", "access_key", "secret_key", "account_key", "private_key",
        "secret_access_key", "client_secret", "connection_string", "sas_token", "access_token",
        "auth_token", "api_token", "session_token", "refresh_token", "aws_secret_access_key",
        "aws_session_token", "hf_token", "sig", "signature", "x_amz_signature",
        "x_amz_security_token",
    }
)  # fmt: skip

#: Values of such settings that say where gcsfs finds the secret; they are not secrets.
_NO_SECRETS = frozenset({"anon", "browser", "cache", "cloud", "google_default"})

#: Text that replaces a secret.
_HIDDEN = "***"

#: A user and a password before the last `@` of an address, but no port. Passwords may have slashes.
_PASSWORD = re.compile(r"(://[^@:/\s]*):(?!\d+(?:/|$))\S+@")

#: A query parameter of an address.
_QUERY = re.compile(r"([?&]([\w.-]+))=[^&#\s]+")

_TODO = (
    "leave it out, and let it be found in the environment (such as AWS_SECRET_ACCESS_KEY, or "
    "FSSPEC_S3_SECRET for any option of fsspec), or in a file of your own, such as ~/.netrc"
)


def refuse_secrets(settings: Mapping[str, object]) -> None:
    """Check that settings, including nested ones, contain no secrets.

    Args:
        settings: Settings by name.

    Raises:
        ConfigError: a setting contains one; the message has its name, but not its value.
    """
    for place, value in leaves(settings):
        name = place.rpartition(".")[2]
        is_set = isinstance(value, str) and value and value not in _NO_SECRETS
        if is_set and _is_secret(name):
            raise ConfigError(
                f"{place} is a secret, and all settings are kept in the run folder",
                accepted="settings without passwords and tokens",
                todo=_TODO,
            )
        if isinstance(value, str):
            refuse_secret_address(value, place)


def refuse_secret_address(text: str, what: str) -> None:
    """Check that an address contains no password or signature; other texts are accepted.

    Raises:
        ConfigError: it does; the message has the address without the secret.
    """
    shown = without_secrets(text) if "://" in text else text
    if shown != text:
        raise ConfigError(
            f"{what} holds a secret, and is kept and printed as it is: {shown}",
            accepted="addresses without passwords and signatures",
            todo=_TODO,
        )


def without_secrets(text: str) -> str:
    """Return a text, such as an argument of a command, with its secrets masked.

    before: token=abc --api-key=abc s3://me:abc@bucket/run?sig=abc
    after:  token=*** --api-key=*** s3://me:***@bucket/run?sig=***
    """
    name, mark, _ = text.partition("=")
    if mark and "://" not in name and _is_secret(name.rpartition(".")[2]):
        return f"{name}={_HIDDEN}"
    text = _PASSWORD.sub(rf"\1:{_HIDDEN}@", text)
    return _QUERY.sub(lambda one: f"{one[1]}={_HIDDEN}" if _is_secret(one[2]) else one[0], text)


def _is_secret(name: str) -> bool:
    return name.lstrip("+~-").replace("-", "_").lower() in _NAMES


def leaves(value: object, place: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values in nested settings, each with its key: `model.rows[0]`."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from leaves(part, f"{place}.{name}" if place else str(name))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from leaves(part, f"{place}[{index}]")
    else:
        yield place, value
