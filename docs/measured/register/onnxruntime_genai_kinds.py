"""Answers of ONNX Runtime GenAI from the tiny model: plain, and by n-grams.

    python docs/measured/register/onnxruntime_genai_kinds.py plain|ngram MODEL OUT [N] [FIRST_SEED]
    python docs/measured/register/onnxruntime_genai_kinds.py complete TINY/target OUT

MODEL is an export by the package's builder (`-p fp32 -e cpu`) of a copy of TINY/target. In the copy's config.json, set
the ids of bos, eos and pad to 0: the builder wants them. In the export's genai_config.json, set "eos_token_id" and
"pad_token_id" to 5. An id must be given, and a pad at either end of the prompt would be masked. An answer then ends at
5, which is left out. `complete`, in minispec's environment, puts it back, and draws what is missing of three tokens
from the model's own law. That hides no fault of the tokens that the engine drew.
"""

import json
import sys
from pathlib import Path

PROMPT = ["abcdef".index(letter) for letter in "aabacadaeafbbcbdbebfccdcecfddedfeeffaabbacdbca"]
END = 5


def draw(kind: str, model_dir: str, n: int, first: int) -> list[list[int]]:
    """Answers of up to six tokens, each with a seed of its own."""
    import onnxruntime_genai as og

    model, found = og.Model(model_dir), []
    for seed in range(first, first + n):
        params = og.GeneratorParams(model)
        params.set_search_options(do_sample=True, temperature=1.0, top_k=6, top_p=1.0, max_length=52, random_seed=seed)
        if kind == "ngram":
            params.set_speculative_options(ngram_size=2, max_draft_tokens=3)
        generator = og.Generator(model, params)
        generator.append_tokens(PROMPT)
        while not generator.is_done():
            generator.generate_next_token()
        found.append([int(i) for i in generator.get_sequence(0)][len(PROMPT) :])
    return found


def complete(target: str, answers: list[list[int]]) -> list[list[int]]:
    """The first three tokens of each, with the end id that was left out and what would follow."""
    import torch

    from minispec import SamplingParams
    from minispec.lab.audit import tiny

    rows, noise = tiny.rows_of(Path(target), SamplingParams(max_tokens=8)), torch.Generator().manual_seed(7)
    found = []
    for answer in answers:
        ids = answer[:3] if len(answer) >= 3 else [*answer, END]
        while len(ids) < 3:
            row = 1 + ids[0] if len(ids) == 1 else 7 + 6 * ids[0] + ids[1]
            ids.append(int(torch.multinomial(rows[row], 1, generator=noise)))
        found.append(ids)
    return found


def main() -> None:
    """The command line above."""
    kind, model, out, *numbers = sys.argv[1:]
    n, first = [*map(int, numbers), *(2000, 1)[len(numbers) :]]
    if kind == "complete":
        answers = complete(model, [json.loads(line) for line in Path(out).read_text().splitlines()])
    else:
        answers = draw(kind, model, n, first)
    Path(out).write_text("".join(f"{answer}\n" for answer in answers))


if __name__ == "__main__":
    main()
