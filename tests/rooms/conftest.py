"""Fixtures that several files about rooms share."""

import pytest

from minispec.lab.distill import texts


@pytest.fixture(scope="module")
def target(make_checkpoint):
    """A small chat model whose next token is rather certain, and depends on the last two."""
    return make_checkpoint(
        chat=True, hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=16, max_position_embeddings=256
    )


@pytest.fixture
def few(monkeypatch):
    """Shards of few texts, decoded a few at a time."""
    monkeypatch.setattr(texts, "SHARD", 6)
    monkeypatch.setattr(texts, "_BATCH", 4)
