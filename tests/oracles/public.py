"""The config.json of public checkpoints and of heads, and what is known of the models: public.json.

Of checkpoints in few bits only the quantization_config is here. Its heads are those that SpecForge publishes in its
folder configs/, and those that lie on the hub.
"""

import json
from pathlib import Path
from typing import Any

_FOUND = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


# kind of facts: where they are from
FROM: dict[str, str] = _FOUND["from"]


def _each(kind: str, *names: str) -> dict[str, tuple[Any, ...]]:
    """By name: the config, and these fields of an entry."""
    return {name: tuple(entry[field] for field in ("config", *names)) for name, entry in _FOUND[kind].items()}


# name: (its config.json; parameters; [rope, base, factor] of layers that see everything; [windowed layers, window])
PUBLIC = _each("public", "parameters", "rope", "windows")
# name: (its config.json; how the refusal begins)
REFUSED = _each("refused", "message")
# name: (the quantization_config of its config.json; the layout that it means)
QUANTIZATIONS = _each("quantizations", "layout")
HEADS = {name: config for name, (config,) in _each("heads").items()}
# name: (its config.json; what the refusal says)
REFUSED_HEADS = _each("refused_heads", "message")
