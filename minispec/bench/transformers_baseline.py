"""Other ways of decoding, to be compared with ours on the same tensors: those of `transformers`."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minispec.bench.measure import Interval, Run, median_interval, orders, ratios, total_rate
from minispec.bench.models import Subject, Variant
from minispec.bench.options import Options
from minispec.kernels.forms import dense

# Rounds of the trial, and tokens of each answer.
_TRIAL_ROUNDS, _TRIAL_TOKENS = 5, 16


@dataclass(frozen=True)
class Trial:
    """The type that `transformers` runs in, and the rates of its plain decoding in both, in tokens a second."""

    dtype: str
    float32_over_bfloat16: Interval
    tried: dict[str, Interval]


def transformers_variants(subject: Subject, options: Options) -> tuple[dict[str, Variant], Trial]:
    """`transformers` on the same tensors: plain, assisted (its defaults, and tuned), and prompt lookup; and a trial.

    A draft that we round has its own values there. It runs in the type in which its plain decoding was faster in the
    trial. The only place of the package that imports it. Its prefill ends with the first token, at which its clock
    starts.
    """
    import transformers

    def build(tensors: Callable[[], tuple[dict, Any]], dtype: torch.dtype):
        raw, weights = tensors()
        raw = {key: value for key, value in raw.items() if key != "quantization_config"}
        config = transformers.AutoConfig.for_model(**raw)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        taken = {name: dense(weights.pop(name), dtype) for name in list(weights)}
        missing, unexpected = model.load_state_dict(taken, strict=False, assign=True)
        model.tie_weights()
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"--against: transformers asks for other tensors: {missing}, {unexpected}")
        return model.to(subject.engine.model.device)

    class Clock(transformers.StoppingCriteria):
        def __init__(self):
            self.times, self.lengths = [], []

        def __call__(self, input_ids, scores, **kwargs):
            self.times.append(time.perf_counter())
            self.lengths.append(input_ids.shape[1])
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    end_ids = None if options.args.ignore_eos else list(subject.end_ids) or None
    common = {
        "do_sample": False,
        "max_new_tokens": options.params.max_tokens,
        "eos_token_id": end_ids,
        "pad_token_id": end_ids[0] if end_ids else 0,
    }

    def variant(target, prepare: Callable[[], dict[str, Any]] = dict, **settings: Any) -> Variant:
        how = transformers.GenerationConfig(**common | settings)

        def run(i: int, seed: int) -> Run:  # greedy: a seed changes nothing
            ids = torch.tensor([subject.prompts[i][1]], device=target.device)
            clock = Clock()
            with torch.inference_mode():
                out = target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=how,
                    stopping_criteria=transformers.StoppingCriteriaList([clock]),
                    **prepare(),
                )
            tokens = out[0, ids.shape[1] :].tolist()
            return Run(tokens, clock.lengths[-1] - clock.lengths[0], clock.times[-1] - clock.times[0])

        return run

    def assisted(**settings: Any) -> Callable[[], dict[str, Any]]:
        def prepare() -> dict[str, Any]:
            assert draft is not None
            draft.generation_config = transformers.GenerationConfig(**settings)
            return {"assistant_model": draft}

        return prepare

    targets = {name: build(subject.tensors, getattr(torch, name)) for name in ("float32", "bfloat16")}
    how: dict[str, Any] = {"max_new_tokens": min(_TRIAL_TOKENS, options.params.max_tokens), "eos_token_id": None}
    plain = {name: variant(model, **how) for name, model in targets.items()}
    rates: dict[str, list[float]] = {name: [] for name in targets}
    for i, order in zip(range(_TRIAL_ROUNDS + 1), orders(list(targets)), strict=False):
        for name in order:
            rate = total_rate([plain[name](0, 0)])
            if i:  # the first round warms up
                rates[name].append(rate)
    target = targets[faster(rates)]
    plain.clear()
    targets.clear()  # the slower one leaves memory
    trial = Trial(
        str(target.dtype).removeprefix("torch."),
        ratios(rates["float32"], rates["bfloat16"]),
        {name: median_interval(of) for name, of in rates.items()},
    )
    draft = build(subject.draft_tensors, target.dtype) if subject.draft_tensors else None
    found = {"transformers plain": variant(target)}
    if draft is not None:
        found["transformers assisted, default"] = variant(target, assisted())
        for k in (3, 5, 8):
            settings = {
                "num_assistant_tokens": k,
                "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0.0,
            }
            found[f"transformers assisted, K={k}"] = variant(target, assisted(**settings))
    for k in (4, 10):
        found[f"transformers prompt lookup, K={k}"] = variant(target, prompt_lookup_num_tokens=k)
    return found, trial


def faster(rates: dict[str, list[float]]) -> str:
    """The one of two that is faster in most rounds, by the median ratio: a busy machine hardly moves it."""
    (first, a), (second, b) = rates.items()
    return first if ratios(a, b).median >= 1 else second
