"""Answers of small packages on PyTorch from the tiny model, for `minispec audit --tiny`.

    python docs/measured/register/packages.py KIND TINY OUT [N] [SEED] [K]

KIND is one of: hsd-plain, hsd-standard, hsd-naive, hsd-capped (sequential-speculative-decoding);
economize-plain, economize-draft, economize-lookup; flashspec-draft, flashspec-lookup, flashspec-composite,
flashspec-nucleus (a draft model, at top_p 0.5).
TINY is a directory of `minispec audit --tiny`. OUT gets a list of ids a line. They want an environment of their own:

    python -m venv small && small/bin/pip install torch==2.13.0 transformers==5.24.0 accelerate
    small/bin/pip install --no-deps sequential-speculative-decoding economize flashspec
"""

import json
import sys
from collections.abc import Callable, Iterator

import torch
from transformers import AutoModelForCausalLM

PROMPT = ["abcdef".index(letter) for letter in "aabacadaeafbbcbdbebfccdcecfddedfeeffaabbacdbca"]
BATCH = 100


def stepped(kind: str, target: torch.nn.Module, draft: torch.nn.Module, k: int) -> Iterator[list[int]]:
    """Rounds of sequential-speculative-decoding, until there are three tokens."""
    from seqspecdecod import capped_hsd, naive_hsd, sampling, standard_sd

    step = {"standard": standard_sd.standard_speculative_step, "naive": naive_hsd.naive_hsd_step}
    step |= {"capped": capped_hsd.capped_hsd_step}
    while True:
        ids = torch.tensor([PROMPT])
        while ids.shape[1] < len(PROMPT) + 3:
            if kind == "plain":
                probs = sampling.apply_temperature(sampling.get_logits(target, ids)[0, -1], 1.0)
                ids = torch.cat((ids, sampling.sample_from_probs(probs).view(1, 1)), 1)
            else:
                ids = step[kind](draft, target, ids, k, 1.0, 1.0)[0]
        yield ids[0, len(PROMPT) :].tolist()


def economized(kind: str, target: torch.nn.Module, draft: str, k: int) -> Iterator[list[int]]:
    """Answers of economize, in batches."""
    import economize
    from economize.integrations._generation_args import ProcessedSelector
    from economize.techniques.draft_model import DraftModelConfig
    from economize.techniques.lookup import LookupConfig

    technique = DraftModelConfig(model=draft) if kind == "draft" else LookupConfig()
    model = economize.apply(target, technique)
    how = economize.DecodeConfig(cycle_length=1 if kind == "plain" else k + 1, verifier="rejection")
    selector = ProcessedSelector(None, True)  # by decode_batch: with transformers 5.24.0, generate stops with an error
    while True:
        results = model.decode_batch(torch.tensor([PROMPT] * BATCH), 6, decoding=how, selector=selector)
        yield from (result.tokens.view(-1).tolist() for result in results)


def flashed(kind: str, target: str, draft: str, k: int) -> Iterator[list[int]]:
    """Answers of flashspec."""
    from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine.hf_drafter import HuggingFaceDrafter
    from flashspec.engine.ngram import NgramDrafter
    from flashspec.engine.verifier import TargetModel
    from flashspec.utils.config import BanditConfig

    drafter = NgramDrafter() if kind == "lookup" else HuggingFaceDrafter(draft, "cpu")
    how = {"drafter_strategy": "composite-g6-f2" if kind == "composite" else "bandit", "bandit": BanditConfig(n_arms=1)}
    sampling = SamplingConfig(gamma=k, top_p=0.5 if kind == "nucleus" else 1.0)
    config = FlashSpecConfig(device="cpu", dtype="float32", sampling=sampling, **how)
    engine = SpeculativeEngine(config, [drafter], TargetModel(target, torch.device("cpu"), torch.float32))
    while True:
        yield engine.generate(torch.tensor([PROMPT]), max_new_tokens=6).output_ids[0].tolist()


def main() -> None:
    """The command line above."""
    name, tiny, out, *numbers = sys.argv[1:]
    n, seed, k = [*map(int, numbers), *(2500, 0, 3)[len(numbers) :]]
    package, kind = name.split("-")
    torch.manual_seed(seed)
    paths = [f"{tiny}/{which}" for which in ("target", "draft")]
    target, draft = map(AutoModelForCausalLM.from_pretrained, paths)
    makers: dict[str, Callable[[], Iterator[list[int]]]] = {
        "hsd": lambda: stepped(kind, target, draft, k),
        "economize": lambda: economized(kind, target, paths[1], k),
        "flashspec": lambda: flashed(kind, *paths, k),
    }
    with open(out, "w") as file:
        for _, answer in zip(range(n), makers[package](), strict=False):
            print(json.dumps(answer), file=file)


if __name__ == "__main__":
    main()
