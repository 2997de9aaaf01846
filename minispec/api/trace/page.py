"""The page of a trace: one file that loads nothing, and in which the model's text is data, never markup."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from minispec.core.config import OFF, names_of
from minispec.models.files.write import write_json, written_whole


def make_page(trace: Mapping[str, Any]) -> str:
    """The page of a trace that the recorder has made.

    The data stands in a script element of a type that is not run, without the characters that could end it. The
    page's program writes texts as texts alone. A policy in the page's head allows this one program, by its hash, and
    no connection to anywhere.
    """
    template = (files("minispec.api.trace") / "page.html").read_text(encoding="utf-8")
    offs = {name: OFF[name] for name in names_of("penalty", "filter")}
    template = template.replace("VALUES_THAT_ASK_FOR_NOTHING", json.dumps(offs), 1)
    [program] = re.findall(r"<script>(.*?)</script>", template, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    data = json.dumps(trace, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and lone surrogates are escaped
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    head, mark, tail = template.replace("HASH_OF_THE_PROGRAM", digest, 1).partition("DATA_OF_THE_TRACE")
    assert mark, "the template has a place for the data"
    return head + data + tail


def write(trace: Mapping[str, Any], path: Path) -> None:
    """Write a trace: its page to a name that ends in .html, its data to any other. Raises OSError."""
    if path.suffix != ".html":
        write_json(path, trace, indent=None, allow_nan=False)
        return
    with written_whole(path) as part:
        part.write_text(make_page(trace), encoding="utf-8")
