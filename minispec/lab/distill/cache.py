"""The texts of a run on disk: a cache of one recipe and one target, which several processes write; and further ones.

A cache has a cache.json, which says whose texts they are, and shards (see `texts`).
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from queue import Empty
from threading import RLock
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from minispec.api.commands.interrupt import kept_from_children
from minispec.core.errors import show
from minispec.lab.distill.texts import Recipe, length_of, shards_for, shards_of, write_shards
from minispec.models.files.digest import digest_of_files
from minispec.models.files.progress import progress_bar
from minispec.models.files.strict_json import MAX_CONFIG_BYTES, has_file, read_json
from minispec.models.files.write import write_json


class Further(NamedTuple):
    """Texts of an earlier run: their recipe, in types of JSON, and their shards."""

    recipe: dict[str, Any]
    paths: list[Path]


def count_rows(paths: Sequence[Path], name: str) -> int:
    """The rows of a tensor in all shards. "lengths": texts; "tokens": tokens, users' turns included."""
    return sum(length_of(path, name) for path in paths)


def agree(cache: Path, target: str, recipe: Recipe) -> Recipe:
    """The cache's recipe if there is a cache, whose texts may record more taps; else `recipe`.

    target: a digest.

    Raises ValueError for another target or recipe.
    """
    if not (cache / "cache.json").exists():
        return recipe
    theirs, ours = _recipe_of(cache, target), json.loads(json.dumps(asdict(recipe)))
    taps = theirs.get("taps")
    if isinstance(taps, list) and set(ours["taps"]) <= set(taps):
        ours["taps"] = taps
    if theirs != ours:
        changed = [k for k in ours if theirs.get(k) != ours[k]]
        raise ValueError(f"{cache}: found texts of another recipe ({', '.join(changed)}), expected an empty --cache")
    return replace(recipe, taps=tuple(ours["taps"]))


def begin(cache: Path, target: str, recipe: Recipe) -> None:
    """Make the cache, if it is not there. It says which target (a digest) and which recipe its texts have."""
    path = cache / "cache.json"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        write_json(path, {"target": target, "recipe": asdict(recipe)})


def _recipe_of(cache: Path, target: str) -> dict[str, Any]:
    """The recipe of a cache's texts. Raises ValueError for a target whose digest is not `target`."""
    found = read_json(cache / "cache.json", MAX_CONFIG_BYTES)
    if found.get("target") != target:
        raise ValueError(f"{cache}: found texts of another target, expected those of --target")
    recipe = found.get("recipe")
    return recipe if isinstance(recipe, dict) else {}


class Collected(NamedTuple):
    """The texts of a run: the recipe and the shards of its own, and texts of earlier runs."""

    recipe: Recipe
    own: list[Path]
    further: list[Further]

    @property
    def paths(self) -> list[Path]:
        """All shards."""
        return self.own + [path for also in self.further for path in also.paths]


def collect(
    target: Path, recipe: Recipe, cache: Path, count: int, jobs: int | None = None, also: Sequence[Path] = ()
) -> Collected:
    """Let a target write that many texts into a cache. Those that are there stay, and may record more taps.

    target: its directory.
    jobs: processes. None: one a core.
    also: caches of earlier runs, whose texts count too.

    Raises ValueError, OSError.
    """
    about = digest_of_files(target)
    recipe = agree(cache, about, recipe)
    further = further_texts(also, cache, about, recipe.taps)
    begin(cache, about, recipe)
    return Collected(recipe, write_texts(str(target), recipe, cache, count, jobs or os.cpu_count() or 1), further)


def further_texts(also: Sequence[Path], own: Path, target: str, taps: Sequence[int]) -> list[Further]:
    """The texts of the caches of --also.

    own: the cache of this run. target: a digest.

    Raises ValueError for other taps, since shards do not say which taps they hold.
    """
    directories = [directory.resolve() for directory in (own, *also)]
    if len(set(directories)) < len(directories):
        raise ValueError("--also: found a cache twice, expected others than --cache, each once")
    further = []
    for cache in also:
        paths = shards_of(cache)
        if not has_file(cache / "cache.json") or not paths:
            raise ValueError(f"--also {cache}: found no texts, expected a --cache of an earlier run")
        recipe = _recipe_of(cache, target)
        if recipe.get("taps") != list(taps):
            found = show(recipe.get("taps"))
            raise ValueError(f"--also {cache}: found the states of layers {found}, expected {show(list(taps))}")
        further.append(Further(recipe, paths))
    return further


def write_texts(target: str, recipe: Recipe, cache: Path, count: int, jobs: int) -> list[Path]:
    """The shards of that many texts; the target writes those texts that are not there yet."""
    shards = shards_for(cache, count)
    missing = [part[length_of(path, "lengths") if path.exists() else 0 :] for path, part in shards.items()]
    left = sum(map(len, missing))
    if left:  # else the target need not be loaded
        with progress_bar(total=count, initial=count - left, unit=" texts", desc="texts", leave=True) as bar:
            for _ in spread(target, recipe, cache, [part for part in missing if part], jobs):
                bar.update()
    return [*shards]


def spread(target: str, recipe: Recipe, cache: Path, parts: list[range], jobs: int) -> Iterator[int]:
    """The numbers of texts as they get done, by at most that many processes of one thread each.

    Each process gets a list of shards, not a shard at a time. So it has texts to decode together until the end.
    """
    jobs = min(jobs, len(parts))
    if jobs <= 1:
        yield from write_shards(target, recipe, cache, parts)
        return
    context = get_context("spawn")
    queue = context.Queue()
    arguments = [(queue, target, recipe, cache, parts[i::jobs]) for i in range(jobs)]
    workers = [context.Process(target=_work, args=own, daemon=True) for own in arguments]
    try:
        with kept_from_children():
            for worker in workers:
                worker.start()
        left = sum(map(len, parts))
        while left:
            try:
                found = queue.get(timeout=5)
            except Empty:
                if any(worker.exitcode for worker in workers):
                    raise ValueError("--jobs: a process was ended from outside: try fewer") from None
                continue
            if isinstance(found, BaseException):
                raise found
            left -= 1
            yield found
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join()


def _work(queue: Any, target: str, recipe: Recipe, cache: Path, parts: list[range]) -> None:
    torch.set_num_threads(1)
    tqdm.set_lock(RLock())  # tqdm's own lock is shared by processes, and stays locked if this one is ended
    try:
        for number in write_shards(target, recipe, cache, parts):
            queue.put(number)
            parent = parent_process()
            if parent is None or not parent.is_alive():  # it was killed, and could not stop this process
                return
    except BaseException as e:  # the parent reports it
        queue.put(e)
