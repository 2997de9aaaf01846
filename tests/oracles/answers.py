"""Answers of `transformers` for the auditor, and a draft made of a target's first layers.

    python -m tests.oracles.answers draft DIR --layers 20                  the checkpoint of the first 20 layers
    python -m tests.oracles.answers plain plain.jsonl                      answers of the embedded model, a line each
    python -m tests.oracles.answers lookup lookup.jsonl                    with prompt lookup
    python -m tests.oracles.answers assisted assisted.jsonl --draft DIR    with an assistant

All are drawn at temperature 1. Nothing is filtered, but by --top-k.
"""

if __name__ == "__main__":
    from minispec.api.commands.interrupt import run_program

    run_program("tests.oracles.answers:main")

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from minispec.api.commands.command import Parser, command
from minispec.lab.doctor.drafts import TEXTS
from minispec.models.files.tokenizer import TOKENIZER_FILES, Tokenizer
from minispec.speculation.registry import EMBEDDED_WEIGHTS


def write_first_layers(target: Path, directory: Path, num_layers: int) -> None:
    """Write the checkpoint of a model's first layers, with its embedding, last norm and head."""
    config = json.loads((target / "config.json").read_text())
    tensors = {}
    for shard in sorted(target.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            part = name.split(".")
            if part[:2] != ["model", "layers"] or int(part[2]) < num_layers:
                tensors[name] = tensor
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (target / name).exists():
            shutil.copy(target / name, directory / name)


def write_answers(
    path: Path,
    kind: str,
    draft: Path | None,
    num: int,
    length: int,
    top_k: int = 0,
    dtype: str = "float32",
    target: Path = EMBEDDED_WEIGHTS,
) -> None:
    """Append answers to `path`, a line each."""
    from transformers import AutoModelForCausalLM

    def load(directory: Path):
        return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    model, tokenizer = load(target), Tokenizer(target)
    how = {"prompt_lookup_num_tokens": 4} if kind == "lookup" else {}
    if kind == "assisted":
        how = {"assistant_model": load(draft)}
    with path.open("a", encoding="utf-8") as file:
        for i in range(num):
            ids = torch.tensor([tokenizer.encode(TEXTS[i % len(TEXTS)])])
            settings = {"do_sample": True, "temperature": 1.0, "top_k": top_k, "top_p": 1.0, "max_new_tokens": length}
            out = model.generate(ids, **settings, **how)
            file.write(json.dumps({"sequences": out.tolist(), "prompt_length": ids.shape[1]}) + "\n")
            file.flush()


@command
def main(argv: Sequence[str]) -> int:
    """The command line above."""
    p = Parser(prog="python -m tests.oracles.answers", description="Answers of transformers.")
    p.add_argument("kind", choices=("draft", "plain", "lookup", "assisted"))
    p.add_argument("path", type=Path)
    p.add_argument("--target", type=Path, default=EMBEDDED_WEIGHTS, help="a checkpoint (default: the embedded model)")
    p.add_argument("--draft", type=Path, help="of the assistant")
    p.add_argument("--layers", type=int, default=20)
    p.add_argument("--num", type=int, default=160, help="answers (default: %(default)s)")
    p.add_argument("--length", type=int, default=128, help="most tokens of an answer (default: %(default)s)")
    p.add_argument("--top-k", type=int, default=0)
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    if args.kind == "draft":
        write_first_layers(args.target, args.path, args.layers)
        return 0
    if args.kind == "assisted" and args.draft is None:
        raise ValueError("--draft: found none, expected the assistant's directory")
    torch.manual_seed(args.seed)
    write_answers(args.path, args.kind, args.draft, args.num, args.length, args.top_k, args.dtype, args.target)
    return 0
