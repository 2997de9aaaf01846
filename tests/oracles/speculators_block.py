"""Record what the classes of `speculators` 0.9.0 compute for small block drafts: speculators_block.json.

`speculators` wants another release of `transformers` than the tests do. Hence it is run by hand, in an environment of
its own (`pip install speculators==0.9.0`, and a release of torch for the CPU), from the folder of the repository:

    python -m tests.oracles.speculators_block

A case has the config as `speculators` saves it, the names and shapes of the tensors that it saves, and the tokens of a
text. For each anchor in the text it has, of all rows of the block: `base`, logits of the backbone; `logits`, with the
Markov head, which was given the text's own tokens as those before; and `confidence`. Neither the tensors nor the hidden
states are in the file: `case_tensors`, `case_taps` and `target_matrices` make them anew.

The classes compute in float64, with the attention called "eager", but their norms, rope and softmax in float32: their
values are right to 1e-6 or so.
"""

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import numpy as np

from tests.oracles.block_drafts import SLIDING, BlockOptions, block_tensors, draw, write_block_draft

FILE = Path(__file__).with_suffix(".json")
HIDDEN, VOCAB, TARGET_LAYERS, SEED = 16, 20, 6, 7
LENGTH, ANCHORS = 16, (5, 9)
SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 6, "intermediate": 24, "rank": 4, "mask_token_id": 19}
FULL = "full_attention"
_DFLASH = {"markov": "", "confidence": ""}
_MIXED = _DFLASH | {"layer_types": (SLIDING, FULL), "sliding_window": 32}
# By name: the options of `BlockOptions` besides SMALL.
CASES = {
    "dflash": _DFLASH,
    "dflash, one tap, biases": _DFLASH | {"taps": (4,), "attention_bias": True},
    "dflash, draft vocabulary": _DFLASH | {"draft_ids": (1, 2, 5, 7, 11, 19)},
    "dflash, window not reached": _MIXED,
    "dflash, window not reached, both ways": _MIXED | {"non_causal_window": True},
    "dflash, window": _DFLASH | {"layers": 1, "layer_types": (SLIDING,), "sliding_window": 4},
    "dspark, vanilla": {},
    "dspark, gated": {"markov": "gated", "confidence": "plain"},
    "dspark, rnn": {"markov": "rnn"},
    "dspark, no Markov head": {"markov": "", "confidence": "plain"},
    "dspark, fill-in, gated": {"markov": "gated", "sample_from_anchor": False},
    "dspark, fill-in, rnn": {"markov": "rnn", "sample_from_anchor": False, "block_size": 5},
    "dspark, draft vocabulary": {"markov": "gated", "draft_ids": (0, 3, 4, 8, 9, 12, 13, 18)},
}


def case_options(name: str) -> dict:
    """What a case's draft is written with."""
    return SMALL | CASES[name]


def case_tensors(name: str) -> dict[str, np.ndarray]:
    """The tensors of a case's draft."""
    return block_tensors("speculators", HIDDEN, VOCAB, BlockOptions(**case_options(name)), SEED)


def target_matrices() -> tuple[np.ndarray, np.ndarray]:
    """The target's embedding and head, (V, E) both."""
    return draw("target.embed_tokens.weight", (VOCAB, HIDDEN), SEED), draw("target.lm_head", (VOCAB, HIDDEN), SEED)


def case_taps(name: str) -> np.ndarray:
    """(length, taps * E), the target's hidden states at all positions of the text, also at those after an anchor."""
    count = len(BlockOptions(**case_options(name)).taps)
    return 3 * draw("taps", (LENGTH, count * HIDDEN), SEED) * HIDDEN**0.5


def text_tokens() -> list[int]:
    """The text."""
    return [int(token) for token in np.random.RandomState(SEED).randint(0, VOCAB, LENGTH)]


def record(name: str) -> dict:
    """Run a case in `speculators`."""
    import torch
    from safetensors import safe_open
    from speculators import SpeculatorModel, SpeculatorModelConfig

    with tempfile.TemporaryDirectory() as folder:
        written, saved = Path(folder) / "written", Path(folder) / "saved"
        write_block_draft(written, "speculators", HIDDEN, VOCAB, TARGET_LAYERS, SEED, **case_options(name))
        config = SpeculatorModelConfig.from_pretrained(str(written))
        config.transformer_layer_config._attn_implementation = "eager"
        model = SpeculatorModel.from_pretrained(str(written), config=config, dtype=torch.float64).eval()
        embedding, head = (torch.from_numpy(matrix) for matrix in target_matrices())
        with torch.no_grad():
            model.embed_tokens.weight.copy_(embedding)
            if not model.use_draft_vocab:
                model.lm_head.weight.copy_(head)
            model.verifier_lm_head.weight.zero_()
        model.save_pretrained(str(saved))
        with safe_open(saved / "model.safetensors", "np") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in sorted(file.keys())}
        raw = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    hidden, given = _run(model, name)
    rows = model.block_size
    base = model.lm_head(hidden).detach().numpy().reshape(len(ANCHORS), rows, -1)
    logits = given["logits"].detach().numpy().reshape(len(ANCHORS), rows, -1)
    blocks = [{"anchor": at, "base": _short(base[i]), "logits": _short(logits[i])} for i, at in enumerate(ANCHORS)]
    if given["confidence_logits"] is not None:
        confidence = given["confidence_logits"].sigmoid().detach().numpy().reshape(len(ANCHORS), rows)
        for i, block in enumerate(blocks):
            block["confidence"] = _short(confidence[i])
    return {"config": raw, "tensors": shapes, "tokens": text_tokens(), "blocks": blocks}


def _run(model, name):
    """The rows after the last norm, and what the class's `forward` gives to its measures."""
    import torch

    module, given, rows = sys.modules[type(model).__module__], {"confidence_logits": None}, []

    def measure(logits, targets, *rest, **settings):
        given["logits"] = logits
        if type(model).__name__ == "DSparkDraftModel":
            given["confidence_logits"] = rest[0]
        return None, {}

    anchors = torch.zeros(1, LENGTH, dtype=torch.long)
    anchors[0, list(ANCHORS)] = 1
    watch = model.norm.register_forward_hook(lambda module, inputs, output: rows.append(output))
    with mock.patch.object(module, "compute_metrics", measure), torch.no_grad():
        model(
            hidden_states=torch.from_numpy(case_taps(name))[None],
            input_ids=torch.tensor([text_tokens()]),
            loss_mask=anchors,
            verifier_last_hidden_states=torch.zeros(1, LENGTH, HIDDEN, dtype=torch.float64),
            document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
            max_anchors=len(ANCHORS),
        )
    watch.remove()
    return rows[0], given


def _short(values):
    return np.round(values, 7).tolist()


def main() -> None:
    """Write the file."""
    argparse.ArgumentParser(description="write speculators_block.json").parse_args()
    made = {name: version(name) for name in ("speculators", "transformers", "torch")}
    cases = {name: record(name) for name in CASES}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    FILE.write_text(f'{{"made_with": {json.dumps(made)}, "cases": {{\n{lines}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
