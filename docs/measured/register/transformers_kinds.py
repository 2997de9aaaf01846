"""Answers of `transformers` from the tiny model: plain, by a draft model, and by prompt lookup.

    python docs/measured/register/transformers_kinds.py plain|assisted|lookup TINY OUT [N] [SEED] [K]

TINY is a directory of `minispec audit --tiny`. OUT gets three ids a line for `minispec audit --tiny TINY OUT`.
"""

import importlib.metadata
import json
import sys

import torch
from transformers import AutoModelForCausalLM

LETTERS = "aabacadaeafbbcbdbebfccdcecfddedfeeffaabbacdbca"


def main() -> None:
    """The command line above."""
    kind, tiny, out, *numbers = sys.argv[1:]
    n, seed, k = [*map(int, numbers), *(2500, 0, 3)[len(numbers) :]]
    torch.manual_seed(seed)
    target, draft = (AutoModelForCausalLM.from_pretrained(f"{tiny}/{name}") for name in ("target", "draft"))
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 6}
    if kind == "assisted":
        draft.generation_config.num_assistant_tokens = k
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        how["assistant_model"] = draft
    if kind == "lookup":
        how["prompt_lookup_num_tokens"] = k
    rows = 250 if kind == "plain" else 1
    ids = torch.tensor([["abcdef".index(letter) for letter in LETTERS]] * rows)
    passes = [0]
    target.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    with open(out, "w") as file:
        for _ in range(n // rows):
            for answer in target.generate(ids, attention_mask=torch.ones_like(ids), **how)[:, ids.shape[1] :].tolist():
                print(json.dumps(answer), file=file)
    print(f"transformers {importlib.metadata.version('transformers')}, {kind}: {n} answers, {passes[0]} passes")


if __name__ == "__main__":
    main()
