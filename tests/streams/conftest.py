"""A cache of the test's own, and a bucket."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_servers import s3_server

from lockstep_streams import server


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(server, "FIRST_WAIT", 0.01)


@pytest.fixture(scope="module")
def bucket(servers: None) -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture
def s3(bucket: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the environment of the clients of a bucket, which is set."""
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)
    return bucket
