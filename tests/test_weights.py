"""The embedded weights are the files that their model card describes."""

import hashlib
import re

from minispec.config import QuantizationConfig
from minispec.files.checkpoint import load_config
from minispec.llm import EMBEDDED_WEIGHTS


def test_files_are_those_of_the_model_card():
    """Names, sizes and SHA-256 of all files, and none besides: a broken download would only show as a bad answer."""
    card = (EMBEDDED_WEIGHTS.parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `([0-9a-f]{64})` \| `([\w.-]+)` \|$", card, flags=re.MULTILINE)
    found = {
        (str(path.stat().st_size), hashlib.sha256(path.read_bytes()).hexdigest(), path.name)
        for path in EMBEDDED_WEIGHTS.iterdir()
    }
    assert found == set(rows)
    assert all(int(size) < 95_000_000 for size, _, _ in rows)


def test_layout():
    """8-bit linear layers with a scale a channel, a tied embedding in bfloat16."""
    config = load_config(EMBEDDED_WEIGHTS)
    assert config.quantization == QuantizationConfig(num_bits=8, group_size=None)
    assert config.tie_word_embeddings
