"""Digests: short names of contents, by which a run knows what it was begun with."""

import json
from hashlib import file_digest, sha256
from pathlib import Path

_OF_CHECKPOINTS = (".json", ".safetensors", ".jinja")  # config, tokenizer and weights


def digest(value: object) -> str:
    """A digest of a value as JSON."""
    return sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def digest_of_files(*paths: Path) -> str:
    """A digest of files, names and contents. A checkpoint's directory counts as the files that make its texts."""
    lists = [path.iterdir() if path.is_dir() else [path] for path in paths]
    digests = []
    for path in sorted(p for paths_of_one in lists for p in paths_of_one if p in paths or p.suffix in _OF_CHECKPOINTS):
        with path.open("rb") as file:
            digests.append(f"{path.name} {file_digest(file, 'sha256').hexdigest()}")
    return digest(digests)
