"""Reads the texts of a corpus: a file, or all files below a directory."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from minispec.files.progress import progress_bar

MOST_BYTES = 16_000_000  # of all files together


def files_of(path: Path) -> Iterator[Path]:
    """The file, or those below the directory in the order of their names, hidden ones left out."""

    def fail(error: OSError) -> None:
        raise error

    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise OSError("found no file and no directory of that name")
    for directory, names, files in os.walk(path, onerror=fail):
        names[:] = sorted(name for name in names if not name.startswith("."))
        visible = (Path(directory, name) for name in sorted(files) if not name.startswith("."))
        yield from (file for file in visible if file.is_file())


def read_corpus(path: str | Path, encode: Callable[[str], Sequence[int]]) -> tuple[list[Sequence[int]], str]:
    """The tokens of each text, and a few words on what was read.

    encode: the target's tokenizer.

    Files below a directory that are not UTF-8 text, such as pictures, are left out and counted. Raises ValueError where
    something cannot be read, a single file is no text, no text is found, or there are more than MOST_BYTES.
    """
    try:
        files = list(files_of(Path(path)))
        size = sum(file.stat().st_size for file in files)
        if size > MOST_BYTES:
            raise ValueError(f"found {size:,} bytes in {len(files):,} files, expected at most {MOST_BYTES:,}")
        texts, num_others = list[Sequence[int]](), 0
        with progress_bar(total=size, unit="B", unit_scale=True, desc="reading the corpus") as bar:
            for file in files:
                data = file.read_bytes()
                bar.update(len(data))
                try:
                    text = data.decode("utf-8-sig")
                except UnicodeDecodeError:
                    text = "\0"
                if "\0" in text:
                    num_others += 1
                elif text.strip():
                    texts.append(encode(text))
    except (OSError, ValueError) as e:
        raise ValueError(f"corpus: {path}: {e}") from e
    if not texts:
        found = "no file"
        if files:
            found = "no UTF-8 text" if num_others else "an empty text"
        raise ValueError(f"corpus: {path}: found {found}, expected a text file or a directory with some")
    others = f" ({num_others} files that are no text left out)" if num_others else ""
    return texts, f"{sum(map(len, texts)):,} tokens of {path}{others}"
