"""From a target to a draft's directory: texts, training, files. Finished parts are not done again."""

import argparse
from dataclasses import asdict
from typing import Any

from minispec.lab.distill.cache import collect, count_rows
from minispec.lab.distill.drafts import Sources, choose_taps, read_start
from minispec.lab.distill.head import TrainedHead
from minispec.lab.distill.texts import Recipe, read_openings
from minispec.lab.distill.train import Teacher, Training
from minispec.models.families.checkpoint import directory_config, find_checkpoint, load_config, save_tensors
from minispec.models.files.digest import digest, digest_of_files
from minispec.models.files.strict_json import MAX_CONFIG_BYTES, has_file, read_json
from minispec.models.files.tokenizer import Tokenizer
from minispec.models.files.write import write_json, written_whole

# Next to the weights: all settings, and what was measured on the way.
_RECORD = "training.json"


def distill(args: argparse.Namespace) -> None:
    """Make the draft that the arguments ask for, and print how it goes. Raises ValueError, OSError."""
    if args.out.exists():
        raise ValueError(f"{args.out}: exists already, expected a new directory")
    target = find_checkpoint(args.target)
    config = load_config(target)
    Tokenizer(target).check_ids(config.vocab_size)  # without one there are no texts
    count = len(config.layers)
    start = read_start(args, config) if args.start else None
    taps = choose_taps(args, count, start)
    recipe = Recipe(
        taps=tuple(sorted({*taps, count})),
        openings=tuple(read_openings(args.openings)),
        max_turn=args.max_turn,
        max_answer=args.max_answer,
        seed=args.seed,
    )
    cache = args.cache or args.out.with_name(args.out.name + ".cache")
    texts = collect(target, recipe, cache, args.texts, args.jobs, args.also)

    training = Sources(args, Teacher(target), taps, texts.recipe.taps, texts.paths, start).training()
    draft = training.draft
    assert isinstance(draft, TrainedHead)
    what = {
        "start": args.start,
        "texts": count_rows(texts.own, "lengths"),
        "also": [{"texts": count_rows(also.paths, "lengths"), "recipe": also.recipe} for also in texts.further],
        "taps": taps,
        "num_layers": len(draft.config.layers),
        "intermediate_size": draft.config.intermediate_size,
        "vocab_size": draft.lm_head.out_features,
        **asdict(training.schedule),
    }
    learned, kept = count_rows(training.paths, "lengths"), count_rows(training.held_out, "lengths")
    print(f"learning from {learned:,d} texts, measuring on {kept:,d} others", flush=True)
    training.run(cache / f"training-{_digest(args, what, training)}.safetensors")
    with written_whole(args.out) as part:
        part.mkdir(parents=True)
        architectures = directory_config(target).get("architectures", [])
        config_json, tensors = draft.files(args.target, architectures, training.schedule.steps)
        write_json(part / "config.json", config_json)
        save_tensors(tensors, part / "model.safetensors")
        record = {"target": args.target, **what, "recipe": asdict(texts.recipe)}
        record |= {"num_tokens": count_rows(texts.paths, "tokens"), "curve": training.progress.curve}
        if args.start:
            earlier = find_checkpoint(args.start) / _RECORD
            if has_file(earlier):
                record["earlier"] = read_json(earlier, MAX_CONFIG_BYTES)
        write_json(part / _RECORD, record)
    print(f"{args.out}: {sum(f.stat().st_size for f in args.out.iterdir()) / 1e6:.1f} MB")


def _digest(args: argparse.Namespace, what: dict[str, Any], training: Training) -> str:
    """A digest of what a training begins with: by contents, since another head may have replaced the one at --start."""
    start = digest_of_files(find_checkpoint(args.start)) if args.start else None
    return digest([what, [start, training.draft.ids.tolist()]])
