"""A plugin that offers two things, for tests of listings; nothing of it is ever built."""

from collections.abc import Mapping

from sbp_core.plugins import Factory, hookimpl

SBP_API_VERSION = 1


@hookimpl
def sbp_boxing_backends() -> Mapping[str, Factory]:
    return {"local": Factory(build="nowhere:build")}


@hookimpl
def sbp_runtimes() -> Mapping[str, Factory]:
    return {"reference": Factory(build="nowhere:build")}
