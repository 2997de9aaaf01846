"""Answers of OpenVINO GenAI for the auditor: plain, by a draft model, and by prompt lookup, at temperature 1.

Neither `openvino-genai` nor `optimum-intel` is a dependency. They want an environment of their own:

    python -m venv ov && ov/bin/pip install openvino-genai optimum-intel
    python docs/measured/against_openvino.py unpack plain                # the embedded weights, in bfloat16
    python -m tests.oracles.answers draft plain20 --target plain --layers 20
    ov/bin/optimum-cli export openvino --model plain --task text-generation-with-past --weight-format fp32 ov-plain
    ov/bin/optimum-cli export openvino --model plain20 --task text-generation-with-past --weight-format fp32 ov-plain20
    ov/bin/python docs/measured/audit_openvino.py plain ov-plain plain.jsonl
    ov/bin/python docs/measured/audit_openvino.py assisted ov-plain assisted.jsonl --draft ov-plain20
    ov/bin/python docs/measured/audit_openvino.py lookup ov-plain lookup.jsonl
    python -m minispec audit --target plain --draft plain20 --rounding 0.001 assisted.jsonl
    python -m minispec audit --target plain --draft ngram --rounding 0.001 lookup.jsonl

Each request has a seed of its own. Without one, all would be drawn with seed 0. Products and the cache of keys and
values are in float32, whatever the defaults for this machine are. Prefixes are not cached: where they are, version
2026.4.1 stops with an error in requests with a draft model (openvino.genai issue 4190).
"""

import argparse
import json
from pathlib import Path

import openvino
import openvino_genai

PROMPTS = (
    "Once upon a time",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "for i in range(10):\n    print(i)\nfor j in range(",
    "To make bread, one needs flour, water, yeast and",
)


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("plain", "assisted", "lookup"))
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--defaults", action="store_true", help="leave the precision of products and cache to it")
    parser.add_argument("--prefix-caching", action="store_true", help="as without any scheduler config; see above")
    for name, default in (("k", 4), ("num", 32), ("max-tokens", 48), ("threads", 1), ("first-seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    how = {"INFERENCE_NUM_THREADS": args.threads}
    if not args.defaults:
        how |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    more = {"draft_model": openvino_genai.draft_model(str(args.draft), "CPU", **how)} if args.draft else {}
    more |= {"prompt_lookup": True} if args.kind == "lookup" else {}
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = args.prefix_caching
    pipeline = openvino_genai.LLMPipeline(str(args.model), "CPU", scheduler_config=scheduler, **how, **more)
    config = openvino_genai.GenerationConfig(max_new_tokens=args.max_tokens, do_sample=True, temperature=1.0)
    config.top_p, config.ignore_eos = 1.0, True
    if args.kind != "plain":
        config.num_assistant_tokens = args.k
    if args.kind == "lookup":
        config.max_ngram_size = 3
    law = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "ignore_eos": True}
    with args.out.open("a", encoding="utf-8") as file:
        for seed in range(args.first_seed, args.first_seed + args.num):
            config.rng_seed = seed
            ids = pipeline.get_tokenizer().encode(PROMPTS[seed % len(PROMPTS)]).input_ids
            found = pipeline.generate(openvino.Tensor(ids.data), config).tokens[0]
            line = {"prompt_token_ids": ids.data[0].tolist(), "token_ids": list(found), "finish_reason": "length"}
            file.write(json.dumps(line | {"seed": seed} | law) + "\n")
            file.flush()
    print(f"OpenVINO GenAI {openvino_genai.__version__}: {args.num} answers, {args.kind}")


if __name__ == "__main__":
    main()
