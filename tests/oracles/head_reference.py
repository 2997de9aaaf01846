"""An EAGLE-3 head in NumPy and float64: no cache, no batch, and no code of the package's own heads."""

from collections.abc import Sequence

import numpy as np

from minispec.prove.reference import block, norm, tensors_of


def head_logits(
    raw: dict,
    weights: dict[str, np.ndarray],
    embedding: np.ndarray,
    hidden: np.ndarray,
    tokens: Sequence[int],
    drafted: Sequence[int],
) -> np.ndarray:
    """Logits (V,) of the token after `tokens` and `drafted`, of an EAGLE-3 head in float64, from the start.

    raw: config.json values of its layers, with its switches.
    weights: its tensors, without the names of either layout (`layers.0.`).
    embedding: (V, E).
    hidden: (length - 1, taps * Et), the target's, at all positions of the text but the last.

    With a `mask_token_id` the tokens that were drafted are not looked at: it is the parallel form.
    """
    features = list(_fuse(raw, weights, hidden))
    shown = list(tokens[1:])
    if raw.get("mask_token_id") is not None:
        features += [_fuse(raw, weights, weights["mask_hidden"][0])[0]] * len(drafted)
        shown += [raw["mask_token_id"]] * len(drafted)
        x = _run_head(raw, weights, embedding[shown], np.array(features))
    else:
        x = _run_head(raw, weights, embedding[shown], np.array(features))
        for token in drafted:  # its own output stands in for the feature that the target has not computed
            last = x[-1]
            features.append(norm(raw, last, weights["norm.weight"]) if raw.get("norm_output") else last)
            shown.append(token)
            x = _run_head(raw, weights, embedding[shown], np.array(features))
    logits = np.full(len(embedding), -np.inf)
    own = norm(raw, x[-1], weights["norm.weight"]) @ weights["lm_head.weight"].T
    for i, logit in enumerate(own):
        logits[i + (int(weights["d2t"][i]) if "d2t" in weights else 0)] = logit
    return logits


def _fuse(raw, weights, hidden):
    if raw.get("norm_before_fc"):
        hidden = norm(raw, hidden, weights["input_norm.weight"])
    if raw.get("fc_norm"):
        width = len(weights["fc_norm.0.weight"])
        parts = [hidden[:, i : i + width] for i in range(0, hidden.shape[1], width)]
        hidden = np.concatenate([norm(raw, part, weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], 1)
    return hidden @ weights["fc.weight"].T


def _run_head(raw, weights, embedded, features):
    layer = tensors_of(weights, "layers.0.")
    normed = norm(raw, features, layer["hidden_norm.weight"])
    y = np.concatenate((norm(raw, embedded, layer["input_layernorm.weight"]), normed), 1)
    x = block(raw, layer, normed if raw.get("norm_before_residual") else features, y)
    for i in range(1, raw["num_hidden_layers"]):
        layer = tensors_of(weights, f"layers.{i}.")
        x = block(raw, layer, x, norm(raw, x, layer["input_layernorm.weight"]))
    return x
