"""The explorer under many requests at once."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from test_explorer import ask, file_of, serving

pytestmark = pytest.mark.slow

GIB = 2**30


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The process and the address of a page on which 50 requests may wait."""
    with serving(tmp_path_factory.mktemp("served"), "QUEUE_SIZE = 50") as (server, url):
        yield psutil.Process(server.pid), url


def test_of_200_requests_at_once_each_is_answered_in_bounded_memory(served, photographs, figure):
    process, url = served
    good, bad = file_of(photographs[0].resize((900, 600)), "JPEG"), b"a renamed text"
    truncated, empty = good[: len(good) // 2], b""
    ask(url, good)  # the first one loads what the others find
    before = process.memory_info().rss
    contents = [good, bad, truncated, empty] * 50

    with ThreadPoolExecutor(len(contents)) as threads:
        answers = list(threads.map(lambda content: ask(url, content), contents))

    kinds = {good: "Predicted: ", truncated: "This file cannot be decoded"}
    busy = "Queue is full. Max size is 50"
    wrong = [
        answer
        for content, answer in zip(contents, answers, strict=True)
        if not answer.startswith((kinds.get(content, "The file must be an image of type"), busy))
    ]
    assert wrong == []
    counts = Counter(answer.startswith(busy) for answer in answers)
    assert min(counts[True], counts[False]) > 0, counts
    grown = process.memory_info().rss - before
    assert grown < GIB
    assert ask(url, good).startswith("Predicted: ")  # and it goes on
    figure(
        f"200 requests at once to the explorer: {counts[False]} answered, {counts[True]} told that the queue is full, "
        f"none lost, {grown / 2**20:.0f} MiB"
    )
