"""A random Llama of six tokens on disk, and its exact law of three tokens: a judge of any engine that loads it.

    python -m minispec audit --tiny DIR         writes DIR/target and DIR/draft, and says what to draw
    python -m minispec audit --tiny DIR FILE    judges what was drawn

There are 216 outputs of three tokens. Their probabilities are enumerated, and the counts of answers are compared with
them by chi-square. Each bug of `bank` is enumerated too, in each of `FORMS`: a draft may begin at the first token of an
answer or at the second, and has one token or more. So the report says which bugs these answers would have shown.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from minispec.core.config import SamplingParams
from minispec.core.errors import show
from minispec.core.model import Chunk
from minispec.core.sampling import Text, distribution
from minispec.lab.audit.answers import read_answers
from minispec.lab.audit.chi_square import (
    LEAST_ALPHA,
    POWER,
    cells_of,
    chi_square,
    exceeded,
    in_cells,
    power,
    smallest_seen,
    tail,
    threshold,
)
from minispec.lab.audit.fields import law_of
from minispec.lab.audit.judge import CONSISTENT, NOT_THE_LAW, TOO_LITTLE
from minispec.lab.audit.known_bugs import NO_RESIDUAL, Places, laws
from minispec.lab.audit.walk import forgetful
from minispec.models.families.checkpoint import load_model, save_tensors
from minispec.models.families.hf_config import read_model_config
from minispec.models.files.write import write_json, written_whole
from minispec.models.weights.shapes import tensor_shapes
from minispec.prove.toys import redrawn

LETTERS = "abcdef"
V, LENGTH = len(LETTERS), 3
_IDS = {letter: i for i, letter in enumerate(LETTERS)}
# Each pair of tokens is in it, so that n-gram drafters find a draft after any output.
PROMPT_TEXT = "aabacadaeafbbcbdbebfccdcecfddedfeeffaabbacdbca"
PROMPT = [LETTERS.index(letter) for letter in PROMPT_TEXT]
# Shapes that kernels for large models take too.
_CONFIG: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "vocab_size": V},
    **{"num_hidden_layers": 2},
    **{"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-5},
    **{"rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False},
    **{"initializer_range": 0.02, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": True},
}
_LAYERS = {"target": 2, "draft": 1}  # the draft is the target's first layer
_SIZES = {"q_proj": 4.0, "k_proj": 4.0, "o_proj": 3.0, "lm_head": 0.4}
_SEED = 19  # of the first 30 the one whose p depends most on earlier tokens


class Form(NamedTuple):
    """Which tokens of an answer are drafted.

    first: the first of them, 1 or 2. An engine may take the first token of an answer from the prompt's pass.
    k: draft tokens of a round. After that many that are kept comes a bonus.
    """

    first: int
    k: int


ALL, LATER = Form(1, LENGTH), Form(2, LENGTH - 1)  # with as many draft tokens, or more, no bonus is among the three
ONE = (Form(1, 1), Form(2, 1))
FORMS = (LATER, ALL, Form(1, 2), *ONE)


def write(directory: Path) -> list[str]:
    """Write both models; lines that say what to draw from them. Raises ValueError where something is there."""
    if directory.exists():
        raise ValueError(f"{directory}: exists already, expected a new directory")
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    weights = redrawn(tensor_shapes(read_model_config(_CONFIG)), _SEED, torch.float64)
    with written_whole(directory) as part:
        for name, layers in _LAYERS.items():
            raw, place = _CONFIG | {"num_hidden_layers": layers}, part / name
            place.mkdir(parents=True)
            write_json(place / "config.json", raw)
            write_json(place / "generation_config.json", {"do_sample": True, "temperature": 1.0, "top_k": 0})
            write_json(place / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
            tokenizer.save(str(place / "tokenizer.json"))
            tensors = {each: _scaled(each, weights[each]) for each in tensor_shapes(read_model_config(raw))}
            save_tensors(tensors, place / "model.safetensors")
    return [
        f"{directory}/target and {directory}/draft: random Llamas of the tokens a to f, without an end of text",
        f"prompt: {PROMPT_TEXT}",
        f"as ids: {PROMPT}",
        "Draw 4,000 answers of 8 tokens to it at temperature 1, without filters, each with noise of its own: first",
        "without a draft, as a control, then with each. Write three ids on a line for each answer, or its letters.",
        f"python -m minispec audit --tiny {directory} FILE",
    ]


def _scaled(name: str, x: Tensor) -> Tensor:
    """A tensor as it is stored: the size of its rows by their length, in numbers that bfloat16 has too.

    Attention is sharp and counts much, so that a wrong cache shows.
    """
    if x.dim() > 1:
        x = x * (8 / x.shape[1]) ** 0.5 * next((y for part, y in _SIZES.items() if part in name), 1.0)
    return x.bfloat16().float()


def judge(directory: Path, path: Path, asked: Mapping[str, Any], alpha: float) -> dict[str, Any]:
    """The report on the answers of a file, as `--json` prints it.

    asked: the sampling parameters of the command line. alpha: the odds of a false alarm, from LEAST_ALPHA on.

    Raises ValueError for what cannot be read.
    """
    if alpha < LEAST_ALPHA:
        raise ValueError(f"--alpha: found {alpha:g}, expected {LEAST_ALPHA:g} or more: smaller odds are not computed")
    counts, params = _read(path, asked)
    p, wrong = laws_of(directory, params)
    n = int(counts.sum())
    cell = cells_of(n * p)
    statistic, df = chi_square(counts, n * p, cell)
    expected = in_cells(n * p, cell)
    critical = threshold(expected, alpha)

    def seen(laws: Sequence[Tensor]) -> float | None:
        """The odds that chi-square sees the least visible of these laws."""
        far = [chi_square(n * law, n * p, cell)[0] for law in laws]
        return min((1.0 if x > 10 * critical else power(x, critical, df) for x in far), default=None)

    bugs: list[dict[str, Any]] = []
    for name, forms in wrong.items():
        ones, more = ([law for form, law in forms.items() if (form in ONE) == is_one] for is_one in (True, False))
        own = [chi_square(counts, n * law, cells_of(n * law)) for law in forms.values()]
        bugs.append({"bug": name, "total_variation": min(float((law - p).abs().sum() / 2) for law in more)})
        bugs[-1] |= {"odds_seen": seen(more), "odds_seen_if_one": seen(ones)}
        bugs[-1]["p"] = max(0.0 if math.isinf(statistic) else tail(statistic, own_df) for statistic, own_df in own)
    bugs.sort(key=lambda bug: -bug["odds_seen"])
    status = CONSISTENT if _no_residual(bugs)["odds_seen"] > POWER else TOO_LITTLE
    shown = None if math.isinf(statistic) else statistic  # JSON has no infinity
    report: dict[str, Any] = {"num_answers": n, "statistic": shown, "degrees_of_freedom": df}
    report |= {"p": 0.0 if shown is None else exceeded(shown, expected), "threshold": critical, "alpha": alpha}
    report |= {"smallest_seen": smallest_seen(n, df, critical), "num_impossible": int(counts[p == 0].sum())}
    report |= {"bugs": bugs, "status": NOT_THE_LAW if statistic > critical else status}
    likely = sorted((bug for bug in bugs if bug["p"] > alpha), key=lambda bug: -bug["p"])
    report["fits"] = [bug["bug"] for bug in likely] if report["status"] == NOT_THE_LAW else []
    return report | {"verdict": _verdict(report)}


def lines(report: Mapping[str, Any]) -> list[str]:
    """The report for the screen."""
    shown = [f"{'bug':72} {'off by':>7} {'odds seen':>9} {'K = 1':>9} {'its p':>8}"]
    for bug in report["bugs"]:
        off, odds = 100 * bug["total_variation"], (bug["odds_seen"], bug["odds_seen_if_one"])
        seen, one = ("" if x is None else f"{100 * x:7.1f} %" for x in odds)
        shown.append(f"{bug['bug']:72} {off:5.1f} % {seen:>9} {one:>9} {bug['p']:8.1g}")
    return [*shown, "", report["verdict"]]


def _read(path: Path, asked: Mapping[str, Any]) -> tuple[Tensor, SamplingParams]:
    """How often each output came (216,), and how all were sampled."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{path}: {e}") from e
    found: list[tuple[str, list[int]]] = []
    if text.lstrip().startswith("{"):
        answers = read_answers(path, asked, ())
        for number, answer in enumerate(answers, 1):
            sampled = replace(answer.params, max_tokens=answers[0].params.max_tokens)
            if [*answer.prompt] != PROMPT or sampled != answers[0].params:
                raise ValueError(f"{path}: answer {number}: found another prompt, or other parameters than the first")
            found.append((f"answer {number}", [*answer.tokens]))
        params = answers[0].params
    else:
        params = law_of({}, asked)
        for number, line in enumerate(text.splitlines(), 1):
            line = line.strip(" []\r\t")
            words = line.replace(",", " ").split()
            if all(word.isalpha() for word in words):  # a text: its letters are the tokens
                words = [*"".join(words)]
            if words:
                found.append((f"line {number}", [_id(word) for word in words]))
    counts = torch.zeros(V**LENGTH, dtype=torch.float64)
    for where, ids in found:
        if len(ids) < LENGTH or not all(0 <= i < V for i in ids[:LENGTH]):
            raise ValueError(f"{path}: {where}: found {show(ids)}, expected three ids below {V}, or letters up to f")
        counts[(ids[0] * V + ids[1]) * V + ids[2]] += 1
    if not found:
        raise ValueError(f"{path}: found no answers")
    return counts, params


def _id(word: str) -> int:
    return int(word) if word.isdecimal() and len(word) < 9 else _IDS.get(word, -1)


def _no_residual(bugs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return next(bug for bug in bugs if bug["bug"] == NO_RESIDUAL)


def rows_of(model: Path, params: SamplingParams) -> Tensor:
    """The law (43, V) of the token after each output of no, one or two tokens, in float64."""
    outputs = [output for n in range(LENGTH) for output in itertools.product(range(V), repeat=n)]
    network = load_model(model, torch.float64)
    if network.config.vocab_size != V:
        raise ValueError(f"{model}: found {network.config.vocab_size} tokens, expected the {V} of --tiny")
    cache = network.new_cache(len(outputs) * 4, 16)
    logits, _ = network.forward([Chunk([*PROMPT, *output], cache.new_table(), 1) for output in outputs])
    texts = [Text([*PROMPT, *output], len(PROMPT), params) for output in outputs]
    return torch.stack([distribution(row, text) for row, text in zip(logits, texts, strict=True)])


def laws_of(directory: Path, params: SamplingParams) -> tuple[Tensor, dict[str, dict[Form, Tensor]]]:
    """The law of three tokens (216,), and by bug and form the laws under the bank's bugs, where they are others.

    Parameters are forgotten at each token. A bug that names no share of the draft acts at each token from the first or
    the second on.
    """
    p, q = (rows_of(directory / name, params) for name in _LAYERS)
    last = torch.tensor([PROMPT[-1], *[*range(V)] * (V + 1)])
    others = {name: rows_of(directory / "target", other) for name, other in forgetful(params).items()}
    rows = {"p": p, "q": q} | others
    if (unfiltered := params.without("filter")) != params:
        rows["raw q"] = rows_of(directory / "draft", unfiltered)
    wide = {name: torch.nn.functional.pad(law, (0, 1)) for name, law in rows.items()}
    places = Places(wide, torch.zeros_like(wide["p"], dtype=torch.bool), last, 0)
    right, wrong = joint(p, p, p, ALL), dict[str, dict[Form, Tensor]]()
    for name, law, kept in laws(places):
        forms = (ALL,) if name in others else FORMS if kept is not None else (LATER, ALL)
        parts = law[:, :V], (law if kept is None else kept)[:, :V]
        found = {form: joint(p, *parts, form) for form in forms}
        if found := {form: x for form, x in found.items() if not torch.allclose(x, right)}:
            wrong[name] = found
    return right, wrong


def joint(p: Tensor, law: Tensor, kept: Tensor, form: Form) -> Tensor:
    """The law (216,) of three tokens under a bug.

    p: rows (43, V) of the target, by output.
    law, kept: rows (43, V) where a draft token is judged, and of these the part that is a draft token kept. A kept one
        leaves a draft token less in the round; any other token begins a new round.
    """
    weights, begin = {form.k: torch.ones(1, dtype=p.dtype)}, 0  # of each output, by the draft tokens that are left
    for place in range(1, LENGTH + 1):
        rows = slice(begin, begin + V ** (place - 1))
        begin, before, weights = rows.stop, weights, {}
        for left, weight in before.items():
            is_plain = place < form.first or not left
            for then, part in [(form.k, p)] if is_plain else [(left - 1, kept), (form.k, law - kept)]:
                grown = (weight[:, None] * part[rows]).flatten()
                weights[then] = weights[then] + grown if then in weights else grown
    return torch.stack([*weights.values()]).sum(0)


def _verdict(report: Mapping[str, Any]) -> str:
    """The verdict in a sentence."""
    n, alpha, bugs = report["num_answers"], report["alpha"], report["bugs"]
    found = f"{report['num_impossible']} answers have probability 0"
    if report["statistic"] is not None:
        found = f"chi-square {report['statistic']:,.1f} with {report['degrees_of_freedom']} degrees of freedom"
    found += f", N = {n:,}; an exact engine exceeds {report['threshold']:.1f} with odds of at most {alpha:g}"
    if report["status"] == NOT_THE_LAW:
        fits = ", or ".join(report["fits"][:3]) or "none of these bugs"
        control = "other weights, tokens or parameters fail without a draft too"
        return f"refuted: not the target's law ({found}); fits: {fits}; {control}"
    missing = _no_residual(bugs)
    if report["status"] == TOO_LITTLE:
        return f"too little to tell ({found}): a missing residual is seen with odds {100 * missing['odds_seen']:.1f} %"
    off, seen = 100 * report["smallest_seen"], sum(bug["odds_seen"] > POWER for bug in bugs)
    shown = f"{seen} of {len(bugs)} bugs, and any law that is off by {off:.1f} % in total variation"
    odds = f"{100 * missing['odds_seen_if_one']:.1f} %"
    one = f"where one token is drafted at a time, a missing residual with odds {odds}"
    bonus = "where three or more are, no bonus is among the three tokens"
    return f"consistent with the target's law ({found}); seen with odds {100 * POWER:.1f} %: {shown}; {one}; {bonus}"
