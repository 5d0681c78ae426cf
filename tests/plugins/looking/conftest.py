"""What the tests of pages share."""

from collections.abc import Iterator

import pytest
from helpers.chromium import Browser, browser


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made
