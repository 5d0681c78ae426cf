"""What the tests of pages share."""

from collections.abc import Iterator

import pytest
from helpers.chromium import Browser, browser


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def chromium(opened: Browser) -> Iterator[Browser]:
    """A browser; whatever a test does with it, its last page complains of nothing."""
    yield opened
    assert opened.complaints() == []
