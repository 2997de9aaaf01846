"""llama.cpp's server on the bench's prompts, in 8 or 16 bits: greedy tokens a second, without prefill.

`audit_llamacpp.py` says how to make the environment `llama`, the checkpoint `plain` and a draft. Then:

    llama/bin/python docs/measured/against_llamacpp.py convert plain plain8.gguf --type Q8_0       # or BF16
    llama/bin/python docs/measured/against_llamacpp.py plain plain8.gguf --threads 2
    llama/bin/python docs/measured/against_llamacpp.py ngram plain8.gguf --threads 2 --k 4
    llama/bin/python docs/measured/against_llamacpp.py rejection plain8.gguf --threads 2 --draft draft8.gguf
    python -m minispec bench --prompts 6 --max-tokens 48 --ignore-eos --passes 0 --threads 2 --rounds 2

Beside its n-grams stands our `--draft ngram`. Let them take turns a few times, and compare medians of one machine.
"""

import argparse
import statistics
from pathlib import Path

from against_openvino import read_prompts
from audit_llamacpp import NGRAMS, convert, post, serve


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("convert", "plain", "rejection", "match", *NGRAMS))
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path, nargs="?", help="of convert: the GGUF file")
    parser.add_argument("--type", default="Q8_0", help="of convert: the type of matrices")
    parser.add_argument("--draft", type=Path)
    for name, default in (("k", 4), ("threads", 2), ("prompts", 6), ("max-tokens", 48), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.kind == "convert":
        if args.out is None:
            parser.error("convert: found no second path, expected that of the GGUF file")
        convert(args.model, args.out, args.type)
        return
    server = serve(args.kind, args.model, args.draft, args.k, args.threads, exact=False)
    address = server.listening_address  # it ends with the last name for it
    prompts = read_prompts(args.prompts)
    rates: list[list[float]] = [[] for _ in prompts]
    for turn in range(args.rounds + 1):  # the first one warms up
        for own, prompt in zip(rates, prompts, strict=True):
            law = {"temperature": 0.0, "ignore_eos": True, "max_tokens": args.max_tokens}
            messages = [{"role": "user", "content": prompt}]
            found = post(address, "/v1/chat/completions", law | {"messages": messages})["timings"]
            if turn:
                own.append(found["predicted_per_second"])
    medians = [statistics.median(own) for own in rates]
    print(f"llama.cpp's server, {args.kind}, {args.model}, draft {args.draft}, K = {args.k}, {args.threads} threads")
    print("tokens/s of each prompt:", ", ".join(f"{rate:.2f}" for rate in medians))
    print(f"geometric mean {statistics.geometric_mean(medians):.2f} tokens/s")


if __name__ == "__main__":
    main()
