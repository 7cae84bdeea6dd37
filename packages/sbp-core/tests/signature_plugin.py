"""A plugin that says how an operator of its own may be split."""

from collections.abc import Mapping

from sbp_core.plugins import Factory, hookimpl

SBP_API_VERSION = 1


def make_rule(config: object) -> str:
    return "i k, k j -> i j"


def make_nonsense(config: object) -> int:
    return 5


@hookimpl
def sbp_signatures() -> Mapping[str, Factory]:
    return {
        "mine.matmul.default": Factory(build="signature_plugin:make_rule"),
        "mine.broken.default": Factory(build="signature_plugin:make_nonsense"),
        "wrong": Factory(build="signature_plugin:make_rule"),
    }
