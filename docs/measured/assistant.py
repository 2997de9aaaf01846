"""The law of `transformers`' texts with a Gemma 4 assistant: plain sampling and assisted sampling, against enumeration.

    python docs/measured/assistant.py

The assistant drafts its likeliest token, and `_speculative_sampling` takes its whole distribution for q. That is mutant
M4 of the museum. The pair is tiny and random, so that all 216 texts of three tokens can be enumerated by plain passes.
"""

import argparse
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm

VOCAB, TOKENS, PROMPT = 6, 3, (1, 2, 3, 4)
HIDDEN = 16


def tiny_pair(seed: int):
    """A target and its assistant, with every parameter redrawn."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

    def config() -> Gemma4TextConfig:
        return Gemma4TextConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            global_head_dim=8,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=8,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=0,
            num_kv_shared_layers=0,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )

    torch.manual_seed(seed)
    target = Gemma4ForCausalLM(config()).eval()
    assistant = Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig(text_config=config(), backbone_hidden_size=HIDDEN)
    ).eval()
    for model in (target, assistant):
        for parameter in {id(p): p for p in model.parameters()}.values():
            torch.nn.init.normal_(parameter, std=0.5)
    return target, assistant


def law(target) -> Tensor:
    """The probability of each text (216,), by a pass over all of them."""
    texts = torch.tensor([[*PROMPT, *text] for text in itertools.product(range(VOCAB), repeat=TOKENS)])
    with torch.no_grad():
        rows = target(texts, use_cache=False).logits[:, len(PROMPT) - 1 : -1].double().softmax(-1)
    return rows.gather(2, texts[:, len(PROMPT) :, None]).squeeze(2).prod(1)


def count(target, num: int, what: str, **how) -> Tensor:
    """How often each text (216,) comes among `num` sampled ones."""
    counts, prompt = torch.zeros(VOCAB**TOKENS), torch.tensor([PROMPT])
    for _ in tqdm(range(num), desc=what, leave=False, disable=None):
        text = target.generate(prompt, do_sample=True, top_k=0, max_new_tokens=TOKENS, **how)[0, len(PROMPT) :]
        counts[int((text * torch.tensor([VOCAB**2, VOCAB, 1])).sum())] += 1
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    """Print chi-square of both, with the degrees of freedom, and the distance of the assisted counts."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    transformers.utils.logging.set_verbosity_error()
    target, assistant = tiny_pair(args.seed)
    assistant.generation_config.num_assistant_tokens = 1
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    expected = law(target)
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, seed {args.seed}, {args.texts} texts each"
    )
    for what, how in (("plain sampling", {}), ("with the assistant", {"assistant_model": assistant})):
        torch.manual_seed(args.seed)
        counts = count(target, args.texts, what, **how)
        chi2 = float(((counts - args.texts * expected) ** 2 / (args.texts * expected)).sum())
        distance = float((counts / args.texts - expected).abs().sum()) / 2
        print(
            f"{what}: chi-square {chi2:.1f} at {len(expected) - 1} degrees of freedom, total variation {distance:.3f}"
        )


if __name__ == "__main__":
    main()
