"""What the package survives, tried and counted; the counts are printed at the end.

python -m pytest -m slow tests/reliability                       the short form, which CI runs
RELIABILITY=long python -m pytest -m slow tests/reliability      as often as docs/reliability.md says
"""

import os
from collections.abc import Callable
from typing import Any

import pytest

LONG = os.environ.get("RELIABILITY") == "long"


@pytest.fixture
def times() -> Callable[[int, int], int]:
    """How often something is tried: in the quick part, and in the long one."""
    return lambda quick, long: long if LONG else quick


@pytest.fixture
def figure(record_property: Callable[[str, Any], None]) -> Callable[[str], None]:
    """Print a sentence with a count at the end of the tests."""
    return lambda text: record_property("figure", text)


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: Any) -> Any:
    passed = terminalreporter.getreports("passed")
    figures = [value for report in passed for name, value in report.user_properties if name == "figure"]
    if figures:
        terminalreporter.section("tried and counted")
        for text in sorted(figures):
            terminalreporter.write_line(text)
    return (yield)
