"""The same saves and loads against a real S3 server process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.distributed.engine_cases import adamw, built, engine_of, tied, train
from tests.distributed.rank_pool import Pool, Rank
from workers.object_store import open_store
from zero_engine import Engine, ZeroConfig
from zero_engine.catalog import delete, list_checkpoints, verify

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from s3_by_hand import CREDENTIALS, S3Server

CONFIG = ZeroConfig(stage=2, micro_batches=4, chunk=2)


@pytest.fixture
def server(missing: Callable[[str], NoReturn]) -> Iterator[S3Server]:
    try:
        planned = S3Server.plan()
    except ImportError:
        missing("moto: the S3 store is not tested")
    with planned:
        yield planned


def save_both_ways(rank: Rank, url: str, environment: dict[str, str]) -> list[str]:
    """A save that is waited for and one in the background; their digests."""
    os.environ.update(environment)
    store = open_store(url)
    engine = engine_of(rank, CONFIG)
    train(engine, 1)
    digests = [engine.save(store, fence=1).digest]
    train(engine, 1)
    saver = engine.saver(store, fence=1)
    saver.save(2)
    digests.append(engine.digest())
    train(engine, 1)
    (report,) = saver.finish()
    assert report.problem == ""
    engine.close()
    return digests


def load(rank: Rank, url: str, environment: dict[str, str]) -> tuple[str, list[str]]:
    os.environ.update(environment)
    engine = Engine.load(
        open_store(url), built(tied), ZeroConfig(stage=3, micro_batches=4, chunk=2), adamw(), rank.group
    )
    assert engine.loaded is not None
    digest, refused = engine.digest(), [item.reason for item in engine.loaded.refused]
    engine.close()
    return digest, refused


def test_a_bucket_is_a_store_like_any_other(pool: Pool, server: S3Server) -> None:
    """Two ranks save in both ways, three load; damage falls back; deletion leaves the bucket empty."""
    environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": server.url, "AWS_ALLOW_HTTP": "true"}
    url = f"s3://{server.bucket}/jobs/1"
    first, second = pool.run(2, save_both_ways, url, environment)[0]
    assert pool.run(3, load, url, environment) == [(second, [])] * 3
    store = open_store(url)
    newest, oldest = list_checkpoints(store)
    assert verify(store, newest.folder).ok and verify(store, oldest.folder).ok
    key = f"{newest.folder}/rank-00001.safetensors"
    data = bytearray(store.get(key))
    data[-5] ^= 1
    store.put(key, data)
    for digest, refused in pool.run(3, load, url, environment):
        assert digest == first and "does not match" in refused[0]
    for name in (newest, oldest):
        delete(store, name.folder)
    assert list(store.list()) == []
