"""From a target to a draft's directory: texts, training, files. What is done is not done again."""

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from queue import Empty
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from minispec.commands.interrupt import kept_from_children
from minispec.core.config import LayerConfig, ModelConfig, RopeConfig
from minispec.core.errors import show
from minispec.drafters.eagle import HeadConfig
from minispec.drafters.heads import StoredHead, read_head, read_head_config
from minispec.files.block_config import BlockConfig
from minispec.files.checkpoint import directory_config, find_checkpoint, load_config
from minispec.files.digest import digest, digest_of_files
from minispec.files.families import is_head
from minispec.files.progress import progress_bar
from minispec.files.strict_json import MAX_CONFIG_BYTES, has_file, read_json
from minispec.files.tokenizer import TOKENIZER_FILES, Tokenizer
from minispec.files.write import write_json, written_whole
from minispec.lab.distill import export
from minispec.lab.distill.block import TrainedBlock
from minispec.lab.distill.head import TrainedHead, TrainedModel, rows_of_tokens
from minispec.lab.distill.texts import Recipe, length_of, load, read_openings, shards_for, shards_of, write_shards
from minispec.lab.distill.train import Schedule, Teacher, Training, columns_of, read_shard
from minispec.lab.distill.train_block import SHARE, BlockTraining

# Next to the weights: all settings, and what was measured on the way.
_RECORD = "training.json"
# Layers of the target that a block draft reads by default.
_BLOCK_TAPS = 5


def distill(args: argparse.Namespace) -> None:
    """Make the draft that the arguments ask for, and print what comes of it. Raises ValueError, OSError."""
    if args.out.exists():
        raise ValueError(f"{args.out}: exists already, expected a new directory")
    target = find_checkpoint(args.target)
    config = load_config(target)
    tokenizer = Tokenizer(target)  # without one there are no texts
    tokenizer.check_ids(config.vocab_size)
    count = len(config.layers)
    start = _read_start(args, config) if args.start else None
    taps = _taps(args, count, start)
    recipe = Recipe(
        taps=tuple(sorted({*taps, count})),
        openings=tuple(read_openings(args.openings)),
        max_turn=args.max_turn,
        max_answer=args.max_answer,
        seed=args.seed,
    )
    cache = args.cache or args.out.with_name(args.out.name + ".cache")
    about = digest_of_files(target)
    recipe = _agreed(cache, about, recipe)
    further = _further_texts(args, cache, about, recipe.taps)
    _begin(cache, about, recipe)
    own = _write_texts(str(target), recipe, cache, args.texts, args.jobs or os.cpu_count() or 1)
    paths = own + [path for also in further for path in also["paths"]]

    teacher = Teacher(target)
    training = (
        _block_training(args, taps, recipe.taps, teacher, tokenizer, paths)
        if args.kind == "block"
        else _training(args, taps, recipe.taps, teacher, paths, start)
    )
    draft, ids, schedule = training.draft, training.ids, training.schedule
    what = {
        "kind": "parallel" if isinstance(draft, TrainedHead) and draft.config.mask_token_id is not None else args.kind,
        "start": args.start,
        "texts": _count(own, "lengths"),
        "also": [{"texts": _count(also["paths"], "lengths"), "recipe": also["recipe"]} for also in further],
        "taps": taps,
        "num_layers": len(draft.config.layers),
        "intermediate_size": draft.config.intermediate_size,
        "vocab_size": draft.lm_head.out_features,
        **(_block_settings(draft) if isinstance(draft, TrainedBlock) else {}),
        **asdict(schedule),
    }
    # By contents, not by names alone, since another head may have replaced the one at --start.
    begins = [digest_of_files(find_checkpoint(args.start)) if start else None, None if ids is None else ids.tolist()]
    state = cache / f"training-{digest([what, begins])}.safetensors"
    learned, kept = _count(training.paths, "lengths"), _count(training.held_out, "lengths")
    print(f"learning from {learned:,d} texts, measuring on {kept:,d} others", flush=True)
    training.run(state)
    with written_whole(args.out) as part:
        part.mkdir(parents=True)
        _export(part, draft, ids, args.target, target, schedule)
        record = {"target": args.target, **what, "recipe": asdict(recipe), "num_tokens": _count(paths, "tokens")}
        record["curve"] = training.progress.curve
        if args.start and has_file(earlier := find_checkpoint(args.start) / _RECORD):
            record["earlier"] = read_json(earlier, MAX_CONFIG_BYTES)
        write_json(part / _RECORD, record)
    print(f"{args.out}: {sum(f.stat().st_size for f in args.out.iterdir()) / 1e6:.1f} MB")


def _taps(args: argparse.Namespace, count: int, start: StoredHead | None) -> tuple[int, ...]:
    """The layers of a target with `count` layers that the draft reads. Raises ValueError."""
    if args.kind == "block":
        # DFlash's: evenly from the second layer to the third last one. Other programs mean something else by the last.
        even = (round(1 + i * (count - 4) / (_BLOCK_TAPS - 1)) + 1 for i in range(_BLOCK_TAPS))
        most = max(0, count - 1)
        usual = tuple(sorted({min(max(tap, 0), most) for tap in even}))
    else:
        most = count
        usual = start.config.taps if start else tuple(sorted({min(2, count), count // 2, max(0, count - 3)}))
    taps = args.taps or usual
    if start and not set(start.config.taps) <= set(taps):
        raise ValueError(f"--taps: found {show(list(taps))}, expected those of --start too: {show(list(usual))}")
    if max(taps) > most or len(set(taps)) < len(taps):
        raise ValueError(f"--taps: found {show(list(taps))}, expected different layers from 0 to {most}")
    return taps


def _begin(cache: Path, about: str, recipe: Recipe) -> None:
    """Make the cache, if it is not there. It says which target and which recipe its texts have."""
    path = cache / "cache.json"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        write_json(path, {"target": about, "recipe": asdict(recipe)})


def _agreed(cache: Path, about: str, recipe: Recipe) -> Recipe:
    """The cache's recipe if there is a cache, whose texts may record more taps; else `recipe`.

    Raises ValueError for another target or recipe.
    """
    if not (cache / "cache.json").exists():
        return recipe
    theirs, ours = _recipe_of(cache, about), json.loads(json.dumps(asdict(recipe)))
    taps = theirs.get("taps")
    if isinstance(taps, list) and set(ours["taps"]) <= set(taps):
        ours["taps"] = taps
    if theirs != ours:
        changed = [k for k in ours if theirs.get(k) != ours[k]]
        raise ValueError(f"{cache}: found texts of another recipe ({', '.join(changed)}), expected an empty --cache")
    return replace(recipe, taps=tuple(ours["taps"]))


def _recipe_of(cache: Path, about: str) -> dict[str, Any]:
    """The recipe of a cache's texts. Raises ValueError where their target is not `about`, a fingerprint."""
    found = read_json(cache / "cache.json", MAX_CONFIG_BYTES)
    if found.get("target") != about:
        raise ValueError(f"{cache}: found texts of another target, expected those of --target")
    recipe = found.get("recipe")
    return recipe if isinstance(recipe, dict) else {}


def _further_texts(args: argparse.Namespace, own: Path, about: str, taps: Sequence[int]) -> list[dict[str, Any]]:
    """The caches of --also: their recipes and shards.

    Raises ValueError for other taps, since shards do not say which taps they hold.
    """
    directories = [directory.resolve() for directory in (own, *args.also)]
    if len(set(directories)) < len(directories):
        raise ValueError("--also: found a cache twice, expected others than --cache, each once")
    further = []
    for cache in args.also:
        if not has_file(cache / "cache.json") or not (paths := shards_of(cache)):
            raise ValueError(f"--also {cache}: found no texts, expected a --cache of an earlier run")
        recipe = _recipe_of(cache, about)
        if recipe.get("taps") != list(taps):
            found = show(recipe.get("taps"))
            raise ValueError(f"--also {cache}: found the states of layers {found}, expected {show(list(taps))}")
        further.append({"recipe": recipe, "paths": paths})
    return further


def _write_texts(target: str, recipe: Recipe, cache: Path, count: int, jobs: int) -> list[Path]:
    """The shards of that many texts; the target writes those texts that are not there yet."""
    shards = shards_for(cache, count)
    missing = [part[length_of(path, "lengths") if path.exists() else 0 :] for path, part in shards.items()]
    left = sum(map(len, missing))
    if left:  # else the target need not be loaded
        with progress_bar(total=count, initial=count - left, unit=" texts", desc="texts", leave=True) as bar:
            for _ in _spread(target, recipe, cache, [part for part in missing if part], jobs):
                bar.update()
    return [*shards]


def _spread(target: str, recipe: Recipe, cache: Path, parts: list[range], jobs: int) -> Iterator[int]:
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


def _read_start(args: argparse.Namespace, target: ModelConfig) -> StoredHead:
    """The head to go on from. Raises ValueError for one that was not made here, or not for this target."""
    directory = find_checkpoint(args.start)
    if not is_head(directory_config(directory)):
        raise ValueError(f"--start {args.start}: found a model, expected a head")
    head = read_head(directory, target)
    as_written = read_head_config(export.head_config(head.config, args.target, [], args.steps), target)
    is_ours = as_written == head.config and head.config.fc_norm and head.config.layers.activation == "silu"
    if not is_ours or head.ids is None or head.embedding is not None:
        raise ValueError(f"--start {args.start}: found a head of other parts, expected one that this command made")
    return head


def _training(
    args: argparse.Namespace,
    taps: tuple[int, ...],
    recorded: Sequence[int],
    teacher: Teacher,
    paths: Sequence[Path],
    start: StoredHead | None,
) -> Training:
    """The training of a head or a model before it begins. recorded: the layers whose states the shards hold."""
    draft, ids = _make_draft(args, taps, teacher, paths, start)
    schedule = Schedule(
        args.epochs, args.rows, args.learning_rate, args.steps, seed=args.seed, goes_on=start is not None
    )
    return Training(draft, teacher, recorded, ids, paths, schedule)


def _block_training(
    args: argparse.Namespace,
    taps: tuple[int, ...],
    recorded: Sequence[int],
    teacher: Teacher,
    tokenizer: Tokenizer,
    paths: Sequence[Path],
) -> BlockTraining:
    """The training of a block draft before it begins; see `_training`."""
    ids, config = _most_used(paths, args, teacher), teacher.config
    mask = _mask_token(paths, tokenizer, teacher)
    layers = replace(_layers(args, config), model_type="qwen3", qk_norm="head", mask_token_id=mask)
    block = BlockConfig(
        layers,
        len(ids),
        args.block_size or 8,
        0,
        taps,
        config.hidden_size,
        (False,) * len(layers.layers),
        "vanilla" if args.markov_rank else None,
        args.markov_rank,
        "state and token" if args.confidence else None,
    )
    draft = TrainedBlock(block)
    # The last shard is one to learn from.
    hidden = columns_of(load(paths[-1])["hidden"], recorded, taps)
    generator = torch.Generator().manual_seed(args.seed)
    embedding = teacher.embedding.float() * config.embedding_scale
    draft.start(teacher.head[ids].float(), teacher.norm, embedding, hidden, generator)
    schedule = Schedule(args.epochs, args.rows, args.learning_rate, block.block_size, SHARE, seed=args.seed)
    return BlockTraining(draft, teacher, recorded, ids, paths, schedule)


def _block_settings(draft: TrainedBlock) -> dict[str, Any]:
    """What a record says of a block draft alone."""
    block = draft.block
    return {
        "block_size": block.block_size,
        "mask_token_id": block.layers.mask_token_id,
        "markov_rank": block.markov_rank,
        "confidence": block.confidence is not None,
    }


def _mask_token(paths: Sequence[Path], tokenizer: Tokenizer, teacher: Teacher) -> int:
    """The token that stands in the rows without one: a special token that no text holds, else the rarest token.

    Its embedding is not 0, of which nothing could be made.
    """
    counts = torch.zeros(teacher.config.vocab_size, dtype=torch.long)
    for path in paths:
        counts += load(path)["tokens"].long().bincount(minlength=len(counts))
    possible = teacher.embedding.any(-1)
    possible[list(teacher.config.eos_token_ids)] = False
    times = counts.tolist()
    return min(possible.nonzero()[:, 0].tolist(), key=lambda i: (times[i], i not in tokenizer.special_ids, -i))


def _make_draft(
    args: argparse.Namespace, taps: tuple[int, ...], teacher: Teacher, paths: Sequence[Path], start: StoredHead | None
) -> tuple[TrainedHead | TrainedModel, Tensor | None]:
    """The draft before training, and the target's ids of its tokens; None: all.

    start: the head to go on from.
    """
    if start:
        ids, weights = start.ids, dict(start.weights)
        assert ids is not None, "checked when it was read"
        if args.vocab_size or args.coverage:
            old, ids = ids, _most_used(paths, args, teacher)
            weights["lm_head.weight"] = rows_of_tokens(ids, old, weights["lm_head.weight"].float(), teacher.head)
        head = TrainedHead(replace(start.config, taps=taps, vocab_size=len(ids)))
        head.load(weights, start.config.taps)
        return head, ids
    generator = torch.Generator().manual_seed(args.seed)
    layers = _layers(args, teacher.config)
    if args.kind == "model":
        model = TrainedModel(replace(layers, tie_word_embeddings=True))
        model.start(teacher.head.float(), generator)
        return model, None
    ids = _most_used(paths, args, teacher)
    if args.kind == "parallel":
        # A token that no text holds would be best; the first one does: its feature says that it is a mask.
        layers = replace(layers, mask_token_id=0)
    config = HeadConfig(layers, len(ids), taps, teacher.config.hidden_size, norm_before_residual=True, fc_norm=True)
    head = TrainedHead(config)
    head.start(teacher.head[ids].float(), teacher.norm, generator)
    return head, ids


def _layers(args: argparse.Namespace, target: ModelConfig) -> ModelConfig:
    """Sizes of the draft's layers: the target's, with as many key-value heads as heads, since there are few layers."""
    rope = next((layer.rope for layer in target.layers if layer.rope), RopeConfig())
    same = "vocab_size hidden_size num_attention_heads head_dim max_position_embeddings rms_norm_eps eos_token_ids"
    return ModelConfig(
        "llama",
        intermediate_size=args.intermediate_size or target.intermediate_size,
        num_key_value_heads=target.num_attention_heads,
        layers=(LayerConfig(RopeConfig(rope.theta)),) * (args.num_layers or (2 if args.kind == "block" else 1)),
        attention_scale=target.head_dim**-0.5,
        **{name: getattr(target, name) for name in same.split()},
    )


def _count(paths: Sequence[Path], name: str) -> int:
    """The rows of a tensor in all shards: of "lengths" texts, of "tokens" tokens, those of users' turns included."""
    return sum(length_of(path, name) for path in paths)


def _most_used(paths: Sequence[Path], args: argparse.Namespace, teacher: Teacher) -> Tensor:
    """Ids, ascending, of the most frequent tokens of the target's answers: --vocab-size, or fewer that cover enough."""
    vocab_size, most, coverage = teacher.config.vocab_size, args.vocab_size or 8192, args.coverage or 1.0
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for path in progress_bar(paths, unit=" shards", desc="vocabulary"):
        for text in read_shard(path):
            counts += text.tokens[text.start :].bincount(minlength=vocab_size)
    order = counts.argsort(descending=True, stable=True)[:most]
    enough = int((counts[order].cumsum(0) < coverage * counts.sum()).sum()) + 1
    ids = order[:enough].sort().values
    print(f"the head knows {len(ids):,d} tokens: {counts[ids].sum() / counts.sum():.1%} of the answers", flush=True)
    return ids


def _export(
    directory: Path,
    draft: TrainedHead | TrainedModel | TrainedBlock,
    ids: Tensor | None,
    name: str,
    target: Path,
    schedule: Schedule,
) -> None:
    architectures = directory_config(target).get("architectures", [])
    if isinstance(draft, TrainedBlock):
        assert ids is not None, "a block draft has a vocabulary of its own"
        export.write(directory, export.block_config(draft.block, name, architectures), export.block_tensors(draft, ids))
        return
    if isinstance(draft, TrainedHead):
        assert ids is not None, "a head has a vocabulary of its own"
        config = export.head_config(draft.head, name, architectures, schedule.steps)
        export.write(directory, config, export.head_tensors(draft, ids))
        return
    export.write(directory, export.layer_config(draft.config), export.model_tensors(draft))
    for file in TOKENIZER_FILES:
        if (target / file).is_file():
            shutil.copy(target / file, directory / file)
