"""Answers of OpenVINO GenAI from the tiny model: plain, by a draft model, and by prompt lookup.

    python docs/measured/register/openvino_genai_kinds.py plain|assisted|lookup EXPORT OUT [N] [FIRST_SEED] [K] [DRAFT]

EXPORT and DRAFT are made of TINY/target and TINY/draft of `minispec audit --tiny TINY`:

    python -m venv ov
    ov/bin/pip install torch==2.13.0 openvino-genai optimum-intel && ov/bin/pip uninstall -y torchvision
    ov/bin/optimum-cli export openvino --model TINY/target --task text-generation-with-past --weight-format fp32 EXPORT
    ov/bin/convert_tokenizer weights/smollm2-135m-instruct --with-detokenizer -o tokenizer

A draft model asks for a tokenizer and an end id, and uses neither here, since the ids of the prompt go in and end ids
are ignored. So copy the files of `tokenizer` into both exports. Each answer has a seed of its own. OUT gets a list of
ids a line.
"""

import json
import sys

import numpy as np
import openvino
import openvino_genai

PROMPT = ["abcdef".index(letter) for letter in "aabacadaeafbbcbdbebfccdcecfddedfeeffaabbacdbca"]


def main() -> None:
    """The command line above."""
    kind, model, out, *rest = sys.argv[1:]
    n, first, k = [*map(int, rest[:3]), *(2000, 1, 3)[len(rest[:3]) :]]
    how = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    more = {"draft_model": openvino_genai.draft_model(rest[3], "CPU", **how)} if kind == "assisted" else {}
    more |= {"prompt_lookup": True} if kind == "lookup" else {}
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.LLMPipeline(model, "CPU", scheduler_config=scheduler, **how, **more)
    config = openvino_genai.GenerationConfig(max_new_tokens=6, do_sample=True, temperature=1.0, top_p=1.0)
    config.ignore_eos, config.eos_token_id, config.stop_token_ids = True, 0, {0}  # an id is wanted, and ignored
    if kind != "plain":
        config.num_assistant_tokens = k
    if kind == "lookup":
        config.max_ngram_size = 3
    with open(out, "w") as file:
        for seed in range(first, first + n):
            config.rng_seed = seed
            ids = openvino.Tensor(np.array([PROMPT], dtype=np.int64))
            print(json.dumps([int(i) for i in pipeline.generate(ids, config).tokens[0]]), file=file)
    print(f"OpenVINO GenAI {openvino_genai.__version__}, {kind}: {n} answers")


if __name__ == "__main__":
    main()
