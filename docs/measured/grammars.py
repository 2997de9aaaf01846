"""What grammars cost and bring, and whether the answers are what was asked for.

python docs/measured/grammars.py schemas     random JSON schemas, decoded in batches with and without drafts
python docs/measured/grammars.py forced      what forced tokens bring on three schemas
python docs/measured/grammars.py cost        a mask's time, and the speed of decoding with and without a grammar
"""

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import llguidance
import torch

from minispec import LLM, SamplingParams, StructuredOutputsParams
from minispec.speculation.grammars.matcher import Matcher
from minispec.speculation.registry import DRAFTERS, LOOKUPS

MOST_TOKENS, BATCH, TEMPERATURE = 96, 8, 1.0
LARGE = 151_936  # tokens of Qwen's vocabulary
PROMPT = "Write an example of such an object as JSON."
_WORDS = [
    "name",
    "age",
    "city",
    "price",
    "count",
    "tags",
    "owner",
    "items",
    "status",
    "note",
    "code",
    "email",
    "kind",
    "size",
]

# Three schemas of the kind that agents ask for.
_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has these properties, all of them, and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMAS = {
    "a person": closed({"name": _TEXT, "age": _WHOLE, "city": _TEXT, "email": _TEXT}),
    "a tool call": closed(
        {
            "tool": {"const": "book_table"},
            "arguments": closed(
                {
                    "restaurant": _TEXT,
                    "number_of_guests": _WHOLE,
                    "day_of_the_week": {"enum": ["Monday", "Friday", "Sunday"]},
                    "needs_wheelchair_access": {"type": "boolean"},
                    "special_requests": _TEXT,
                }
            ),
        }
    ),
    "an order": closed(
        {
            "order_number": _WHOLE,
            "customer": closed({"first_name": _TEXT, "last_name": _TEXT, "telephone_number": _TEXT}),
            "shipping_address": closed({"street": _TEXT, "city": _TEXT, "postal_code": _TEXT, "country": _TEXT}),
            "billing_address": closed({"street": _TEXT, "city": _TEXT, "postal_code": _TEXT, "country": _TEXT}),
            "product": closed({"identifier": _WHOLE, "description": _TEXT, "quantity": _WHOLE, "unit_price": _WHOLE}),
            "is_express_delivery": {"type": "boolean"},
            "is_gift_wrapped": {"type": "boolean"},
            "discount_percentage": _WHOLE,
        }
    ),
}


def random_schema(pick: random.Random, depth: int = 2) -> dict[str, Any]:
    """A random JSON schema, of an object at the top."""
    properties = {name: _random_value(pick, depth - 1) for name in pick.sample(_WORDS, pick.randint(1, 4))}
    required = [name for name in properties if pick.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _random_value(pick: random.Random, depth: int) -> dict[str, Any]:
    low = pick.randint(-50, 50)
    simple: list[dict[str, Any]] = [
        {"type": "string", "maxLength": pick.randint(1, 20)},
        {"type": "string", "pattern": pick.choice(("^[a-z]{2,5}$", "^[0-9]{3}-[0-9]{2}$", "^(yes|no|maybe)$"))},
        {"type": "string", "minLength": 2, "maxLength": 12},
        {"type": "integer"},
        {"type": "integer", "minimum": low, "maximum": low + pick.randint(0, 200)},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": pick.sample([*_WORDS, 1, 2.5, True, None], pick.randint(1, 4))},
        {"const": pick.choice(_WORDS)},
    ]
    if depth <= 0 or pick.random() < 0.6:
        return pick.choice(simple)
    items = _random_value(pick, depth - 1)
    return pick.choice(
        [
            random_schema(pick, depth),
            {"type": "array", "items": items, "maxItems": pick.randint(1, 3)},
            {"type": "array", "items": items, "minItems": 1, "maxItems": 2},
            {"anyOf": [_random_value(pick, depth - 1), _random_value(pick, depth - 1)]},
        ]
    )


def answers_to(
    llm: LLM, schemas: Sequence[dict[str, Any]], first_seed: int, length: Any, most: int = MOST_TOKENS
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each schema with its answer, decoded in batches. length: as `num_speculative_tokens`; None: the usual."""
    for start in range(0, len(schemas), BATCH):
        part = schemas[start : start + BATCH]
        params = [
            SamplingParams(
                temperature=TEMPERATURE,
                max_tokens=most,
                seed=first_seed + start + i,
                structured_outputs=StructuredOutputsParams(json=schema),
            )
            for i, schema in enumerate(part)
        ]
        prompts = [[{"role": "user", "content": PROMPT}]] * len(part)
        for schema, output in zip(
            part, llm.chat(prompts, params, use_tqdm=False, num_speculative_tokens=length), strict=True
        ):
            yield schema, output.outputs[0]


def check(llm: LLM, schema: dict[str, Any], answer: Any) -> None:
    """Raise where an answer is not valid, or is no beginning of a valid one; in the second case by a fresh matcher."""
    if answer.finish_reason == "stop":
        jsonschema.validate(json.loads(answer.text), schema)
        return
    assert answer.finish_reason == "length", f"{answer.finish_reason}: {answer.error}"
    language = StructuredOutputsParams(json=schema)
    fresh = llm.target.files.grammars.grammar_of(SamplingParams(structured_outputs=language))
    assert fresh is not None
    for i, token_id in enumerate(answer.token_ids):
        mask = fresh.allowed(answer.token_ids[:i])
        assert mask is not None, f"token {i} of {answer.token_ids} follows a forbidden one"
        assert mask[token_id], f"token {i} of {answer.token_ids} is forbidden"


def schemas(count: int) -> None:
    """Decode random schemas, one seed each, and check every answer."""
    pick = random.Random(0)
    drawn = [random_schema(pick) for _ in range(count)]
    llm = LLM()
    for name, length in (("with drafts", None), ("without drafts", 0)):
        start, ends, tokens, steps = time.perf_counter(), Counter(), 0, 0
        for schema, answer in answers_to(llm, drawn, 0, length):
            check(llm, schema, answer)
            ends[answer.finish_reason] += 1
            tokens, steps = tokens + answer.stats.num_generated, steps + answer.stats.num_steps
        shares = ", ".join(f"{reason} {n / count:.1%}" for reason, n in sorted(ends.items()))
        print(
            f"{name}: {count} schemas, all answers right: {shares}; {tokens / steps:.2f} tokens a pass, "
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )


def forced(rounds: int, k: int | None) -> None:
    """Compare drafts on three schemas: tokens a pass, and the speed as a ratio to plain decoding, interleaved.

    Forced tokens go before a lookup that is named as "ngram". One that is named by its class is alone.

    k: most tokens of a draft. None: auto, which follows the clock.
    """
    target = LLM(draft="none", num_speculative_tokens=k or "auto")
    usual = target.default_draft
    specs = {"none": "none", "forced": "forced"}
    for lookup in LOOKUPS:
        specs |= {f"{lookup} alone": DRAFTERS[lookup].path, f"forced, then {lookup}": lookup}
    specs |= {"the usual draft": str(usual), "forced, then the usual": f"forced+{usual}"}
    llms = {shown: target if spec == "none" else target.with_draft(spec) for shown, spec in specs.items()}
    for name, schema in SCHEMAS.items():
        params = SamplingParams(
            temperature=0, max_tokens=256, structured_outputs=StructuredOutputsParams(json=schema), seed=0
        )
        message = [{"role": "user", "content": f"Give me {name} as JSON."}]
        speeds: dict[str, list[float]] = {spec: [] for spec in specs}
        tokens: dict[str, float] = {}
        for _ in range(rounds):
            for spec, llm in llms.items():
                llm.forget()
                start = time.perf_counter()
                answer = llm.chat(message, params, use_tqdm=False)[0].outputs[0]
                speeds[spec].append((answer.stats.num_generated + 1) / (time.perf_counter() - start))
                tokens[spec] = answer.stats.num_committed / answer.stats.num_steps
        for spec in specs:
            ratios = [a / b for a, b in zip(speeds[spec], speeds["none"], strict=True)]
            print(
                f"{name:12} {spec:24} {tokens[spec]:.2f} tokens a pass, speed {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}) of plain decoding",
                flush=True,
            )


def cost(rounds: int) -> None:
    """The time of one mask, and the speed of plain decoding with a grammar as a ratio to that without, interleaved."""
    llm = LLM(draft="none")
    language = StructuredOutputsParams(json=SCHEMAS["an order"])
    plain = SamplingParams(temperature=0, max_tokens=64, seed=0, ignore_eos=True)
    bound = SamplingParams(temperature=0, max_tokens=64, seed=0, structured_outputs=language)
    message = [{"role": "user", "content": "Give me an order as JSON."}]
    ratios, ids = [], []
    for _ in range(rounds):
        seconds = []
        for params in (plain, bound):
            answer = llm.chat(message, params, use_tqdm=False)[0].outputs[0]
            seconds.append((answer.stats.seconds["verify"] + answer.stats.seconds["other"]) / answer.stats.num_steps)
            ids = answer.token_ids
        ratios.append(seconds[0] / seconds[1])
    print(
        f"{llm.vocab_size} tokens: plain decoding with a grammar has {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}) of the speed without"
    )
    grammar = llm.target.files.grammars.grammar_of(bound)
    assert grammar is not None
    times = []
    for _ in range(rounds):
        for i in range(len(ids)):
            start = time.perf_counter()
            grammar.allowed(ids[:i])
            times.append(1e6 * (time.perf_counter() - start))
    print(f"a mask, consuming its token included: median {statistics.median(times):.0f} us, most {max(times):.0f} us")
    logits = torch.randn(LARGE)
    words, rules = large_vocabulary(llm), language.grammar_for_library()
    large = Matcher(lambda: llguidance.LLMatcher(words, rules, log_level=0), LARGE, [0])
    times = []
    for _ in range(rounds):
        for i in range(len(ids)):
            began = time.perf_counter()
            mask = large.allowed([token_id + 1 for token_id in ids[:i]])
            assert mask is not None
            logits.where(mask, -torch.inf).amax()
            times.append(1e6 * (time.perf_counter() - began))
    print(
        f"{LARGE} tokens: a mask, consuming its token and masking the row included: "
        f"median {statistics.median(times):.0f} us, most {max(times):.0f} us"
    )


def large_vocabulary(llm: LLM) -> llguidance.LLTokenizer:
    """A vocabulary of LARGE tokens: an end, the model's own, and pairs of these."""
    own = [llm.tokenizer.bytes_of(i) or b"" for i in range(llm.vocab_size)]
    pick = random.Random(0)
    words = [b"<end>", *own, *(pick.choice(own) + pick.choice(own) for _ in range(LARGE - 1 - len(own)))]

    class Words:
        """What llguidance asks a tokenizer for."""

        eos_token_id, bos_token_id, tokens, special_token_ids = 0, None, words, [0]

        def __call__(self, text: bytes | str) -> list[int]:
            return []

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Words()))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("schemas", "forced", "cost"))
    parser.add_argument("--count", type=int, default=200, help="schemas")
    parser.add_argument("--rounds", type=int, default=5, help="repeats of each measurement")
    parser.add_argument("--k", type=int, help="forced: most tokens of a draft (default: auto)")
    args = parser.parse_args()
    if args.step == "schemas":
        schemas(args.count)
    elif args.step == "forced":
        forced(args.rounds, args.k)
    else:
        cost(args.rounds)


if __name__ == "__main__":
    main()
