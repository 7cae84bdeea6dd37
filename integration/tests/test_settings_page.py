"""Every setting of every option file says what it means, as does `docs/reference/settings.md`."""

from __future__ import annotations

import pytest

from settings.__main__ import main


def test_the_page_of_settings_is_what_the_option_files_say(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = main(["document", "--check"])

    assert code == 0, f"python -m settings document: {capfd.readouterr().out}"
