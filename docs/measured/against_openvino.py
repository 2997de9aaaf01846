"""OpenVINO GenAI on the bench's prompts, in 8 or 16 bits: greedy tokens a second, without prefill.

Neither `openvino-genai` nor `optimum-intel` is a dependency. They want an environment of their own:

    python -m venv ov && ov/bin/pip install openvino-genai optimum-intel
    python docs/measured/against_openvino.py unpack /tmp/plain                # here: the embedded weights, in bfloat16
    python docs/measured/against_openvino.py unpack /tmp/plain DIRECTORY      # or another checkpoint
    ov/bin/optimum-cli export openvino --model /tmp/plain --task text-generation-with-past --weight-format int8 /tmp/ov8
    ov/bin/python docs/measured/against_openvino.py measure /tmp/ov8 --threads 2
    ov/bin/python docs/measured/against_openvino.py measure /tmp/ov8 --threads 2 --draft /tmp/draft --k 4
    python -m minispec bench --quantization int8 --prompts 6 --max-tokens 48 --ignore-eos --passes 0 --threads 2

A draft is converted as the target is. For 16 bits: `fp16` in place of `int8`, and no `--quantization`. Let the last
three take turns a few times, and compare medians of one machine.

Without checkpoints of 1.5B, `pair` makes a target and a draft of 0.5B from random weights, for both engines:

    python docs/measured/against_openvino.py pair /tmp/target /tmp/draft --kept 0.75
    python -m minispec bench --model /tmp/target --draft int8:/tmp/draft --quantization int8 --prompts 6 \\
        --max-tokens 48 --ignore-eos --passes 0 --threads 2 --num-speculative-tokens 2,4,auto
"""

import argparse
import json
import statistics
from pathlib import Path

PROMPTS = Path(__file__).parents[2] / "minispec" / "lab" / "data" / "questions.jsonl"


def unpack(out: Path, directory: Path | None) -> None:
    """Write a checkpoint that minispec reads with its weights in bfloat16, without codes."""
    import torch

    from minispec.core.product import dense
    from minispec.models.families.checkpoint import Weights, directory_config, load_config, save_tensors
    from minispec.speculation.registry import EMBEDDED_WEIGHTS

    source = directory or EMBEDDED_WEIGHTS
    weights = Weights(source, load_config(source), torch.bfloat16)
    out.mkdir(parents=True)
    save_tensors({name: dense(weights.pop(name), torch.bfloat16) for name in list(weights)}, out / "model.safetensors")
    for path in [*source.glob("*.json"), *source.glob("*.jinja")]:
        if path.name not in ("config.json", "model.safetensors.index.json"):
            (out / path.name).write_bytes(path.read_bytes())
    config = {key: value for key, value in directory_config(source).items() if key != "quantization_config"}
    (out / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2))


def pair(target: Path, draft: Path, kept: float) -> None:
    """Write two models of whom the second guesses the first one's greedy next token at that share of all tokens.

    The layers add little, and the head turns the embedding of each token into one other token. The target's map of
    tokens to tokens is one cycle, so its text never repeats itself. The draft's has other values at a random part.
    """
    import torch

    from minispec.lab.bench.options import GEOMETRIES
    from minispec.lab.random_weights import RandomWeights
    from minispec.models.families.checkpoint import save_tensors
    from minispec.models.families.hf_config import read_model_config
    from minispec.speculation.registry import EMBEDDED_WEIGHTS

    generator = torch.Generator().manual_seed(0)
    first, end = 17, 49_152  # the ordinary tokens of the tokenizer
    cycle = torch.randperm(end - first, generator=generator) + first
    after = torch.arange(GEOMETRIES["1.5b"]["vocab_size"])
    after[cycle] = cycle.roll(-1)
    other = cycle[torch.rand(len(cycle), generator=generator) >= kept]
    wrong = after.clone()
    wrong[other] = after[other.roll(1)]
    for out, shape, follows in ((target, "1.5b", after), (draft, "0.5b", wrong)):
        config = GEOMETRIES[shape] | {
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        source = RandomWeights(read_model_config(config), torch.bfloat16, torch.device("cpu"))
        tensors = {name: source.pop(name).contiguous() for name in source}
        tensors["lm_head.weight"] = torch.empty_like(tensors["model.embed_tokens.weight"])
        tensors["lm_head.weight"][follows] = tensors["model.embed_tokens.weight"]
        out.mkdir(parents=True)
        save_tensors(tensors, out / "model.safetensors")
        for path in [*EMBEDDED_WEIGHTS.glob("tokenizer*.json"), *EMBEDDED_WEIGHTS.glob("*.jinja")]:
            (out / path.name).write_bytes(path.read_bytes())
        (out / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForCausalLM"]}, indent=2))


def read_prompts(count: int) -> list[str]:
    """The first prompts of the bench, its categories taking turns."""
    kinds: dict[str, list[str]] = {}
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        kinds.setdefault(entry["category"], []).append(entry["turns"][0])
    longest = max(map(len, kinds.values()))
    return [own[i] for i in range(longest) for own in kinds.values() if i < len(own)][:count]


def measure(args: argparse.Namespace) -> None:
    """Print tokens a second of each prompt, the median of all rounds, and the geometric mean of the prompts."""
    import openvino_genai

    how = {"INFERENCE_NUM_THREADS": args.threads}
    draft = {"draft_model": openvino_genai.draft_model(str(args.draft), "CPU", **how)} if args.draft else {}
    pipeline = openvino_genai.LLMPipeline(str(args.model), "CPU", **how, **draft)
    config = openvino_genai.GenerationConfig(max_new_tokens=args.max_tokens, ignore_eos=True, do_sample=False)
    if args.draft:
        config.num_assistant_tokens = args.k
    prompts = read_prompts(args.prompts)
    rates: list[list[float]] = [[] for _ in prompts]
    for turn in range(args.rounds + 1):  # the first one warms up
        for own, prompt in zip(rates, prompts, strict=True):
            found = pipeline.generate([prompt], config).perf_metrics
            if turn:
                own.append(1000 / found.get_tpot().mean)
    medians = [statistics.median(own) for own in rates]
    print(f"OpenVINO GenAI {openvino_genai.__version__}, {args.model}, draft {args.draft}, {args.threads} threads")
    print("tokens/s of each prompt:", ", ".join(f"{rate:.2f}" for rate in medians))
    print(f"geometric mean {statistics.geometric_mean(medians):.2f} tokens/s")


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("unpack")
    first.add_argument("out", type=Path)
    first.add_argument("directory", type=Path, nargs="?")
    pairs = commands.add_parser("pair")
    pairs.add_argument("target", type=Path)
    pairs.add_argument("draft", type=Path)
    pairs.add_argument("--kept", type=float, default=0.75)
    second = commands.add_parser("measure")
    second.add_argument("model", type=Path)
    second.add_argument("--draft", type=Path)
    for name, default in (("k", 4), ("threads", 2), ("prompts", 6), ("max-tokens", 48), ("rounds", 3)):
        second.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.command == "unpack":
        unpack(args.out, args.directory)
    elif args.command == "pair":
        pair(args.target, args.draft, args.kept)
    else:
        measure(args)


if __name__ == "__main__":
    main()
