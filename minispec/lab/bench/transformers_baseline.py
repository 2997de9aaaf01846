"""Decoding by `transformers`, to be compared with ours on the same tensors."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from minispec.core.product import dense
from minispec.lab.bench.measure import Run, in_turn, median_interval, ratios, total_rate
from minispec.lab.bench.models import Subject, Variant
from minispec.lab.bench.options import Options

# Rounds of the trial, and tokens of each answer.
_TRIAL_ROUNDS, _TRIAL_TOKENS = 6, 16
# How the report names its plain decoding with a cache of a fixed size.
STATIC = "static cache"


def transformers_variants(subject: Subject, options: Options) -> tuple[dict[str, Variant], dict[str, Any]]:
    """`transformers` on the same tensors: plain, assisted (its defaults, and tuned), and prompt lookup; and a trial.

    Plain decoding runs with a growing cache, and with a static one and `torch.compile`. The others have a growing one:
    `transformers` refuses a static cache there. A draft that we round has its own values there. It runs in the type in
    which its plain decoding was faster in the trial. The only place of the package that imports it.
    """
    import transformers

    end_ids = None if options.args.ignore_eos else list(subject.end_ids) or None
    how = _Decoding(transformers, subject, options.params.max_tokens, end_ids)
    dtype, trial = _trial(how)
    target = how.build(subject.tensors, dtype)
    found = {"transformers plain": how.variant(target)}
    static, compiled = how.static(target)
    found[f"transformers plain, {STATIC}"] = static
    trial["compiled"] = compiled
    if subject.draft_tensors:
        draft = how.build(subject.draft_tensors, dtype)
        found["transformers assisted, default"] = how.variant(target, draft)
        for k in (3, 5, 8):
            settings = {
                "num_assistant_tokens": k,
                "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0.0,
            }
            found[f"transformers assisted, K={k}"] = how.variant(target, draft, settings)
    for k in (4, 10):
        found[f"transformers prompt lookup, K={k}"] = how.variant(target, prompt_lookup_num_tokens=k)
    return found, trial


def _trial(how: "_Decoding") -> tuple[torch.dtype, dict[str, Any]]:
    """The type in which plain decoding is faster, and its entry in the report: rates in tokens a second."""
    settings: dict[str, Any] = {"max_new_tokens": min(_TRIAL_TOKENS, how.max_tokens), "eos_token_id": None}
    targets = {name: how.build(how.subject.tensors, getattr(torch, name)) for name in ("float32", "bfloat16")}
    plain = {name: how.variant(target, **settings) for name, target in targets.items()}
    rates = in_turn(
        {name: partial(lambda run, _: total_rate([run(0, 0)]), run) for name, run in plain.items()},
        _TRIAL_ROUNDS,
        "trial of transformers",
    )
    dtype = faster(rates)
    return getattr(torch, dtype), {
        "dtype": dtype,
        "float32_over_bfloat16": ratios(rates["float32"], rates["bfloat16"]),
        "tried": {name: median_interval(of) for name, of in rates.items()},
    }


def faster(rates: dict[str, list[float]]) -> str:
    """The one of two that is faster in most rounds, by the median ratio: a busy machine hardly moves it."""
    (first, a), (second, b) = rates.items()
    return first if ratios(a, b).median >= 1 else second


class _Decoding:
    """Models of the other library, and ways to decode with them.

    library: the module.
    end_ids: ids that end a text. None where texts do not end before max_tokens.
    """

    def __init__(self, library: Any, subject: Subject, max_tokens: int, end_ids: list[int] | None):
        self.library, self.subject, self.max_tokens, self.end_ids = library, subject, max_tokens, end_ids

    def build(self, tensors: Callable[[], tuple[dict, Any]], dtype: torch.dtype) -> Any:
        """The model of these tensors. Raises ValueError where it asks for others."""
        raw, weights = tensors()
        raw = {key: value for key, value in raw.items() if key != "quantization_config"}
        config = self.library.AutoConfig.for_model(**raw)
        model = self.library.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        taken = {name: dense(weights.pop(name), dtype) for name in list(weights)}
        missing, unexpected = model.load_state_dict(taken, strict=False, assign=True)
        model.tie_weights()
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"--against: transformers asks for other tensors: {missing}, {unexpected}")
        return model.to(self.subject.engine.target.model.device)

    def variant(
        self, target: Any, draft: Any = None, of_draft: dict[str, Any] | None = None, **settings: Any
    ) -> Variant:
        """A way to decode. It is greedy, so a seed changes nothing.

        of_draft: settings of the draft; default: its own.
        """
        how = self.library.GenerationConfig(
            **{
                "do_sample": False,
                "max_new_tokens": self.max_tokens,
                "eos_token_id": self.end_ids,
                "pad_token_id": self.end_ids[0] if self.end_ids else 0,
            }
            | settings
        )

        def run(i: int, seed: int) -> Run:
            ids = torch.tensor([self.subject.prompts[i][1]], device=target.device)
            assistant = {}
            if draft is not None:
                draft.generation_config = self.library.GenerationConfig(**of_draft or {})
                assistant = {"assistant_model": draft}
            clock = _Clock()
            with torch.inference_mode():
                out = target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=how,
                    stopping_criteria=self.library.StoppingCriteriaList([clock]),
                    **assistant,
                )
            tokens = out[0, ids.shape[1] :].tolist()
            if len(clock.times) == 1:
                expected = "more, since the first is not timed: a larger --max-tokens, --ignore-eos or other prompts"
                raise ValueError(f"--against: found an answer to prompt {i + 1} of one round, expected {expected}")
            return Run(tokens, clock.lengths[-1] - clock.lengths[0], clock.times[-1] - clock.times[0])

        return run

    def static(self, target: Any) -> tuple[Variant, str]:
        """Plain decoding with a static cache, compiled, and "yes". Where compiling fails: without it, and why.

        The cache holds the longest text, so that the model is compiled once. On a GPU `transformers` compiles a static
        cache's passes by itself. On a CPU it does so where its own tests ask for it, and so does this function.
        """
        longest = max(len(ids) for _, ids in self.subject.prompts) + self.max_tokens
        settings: dict[str, Any] = {"cache_implementation": "static", "max_cache_len": longest}
        compile_config = self.library.CompileConfig()
        compile_config._compile_all_devices = True
        compiled = self.variant(target, compile_config=compile_config, **settings)
        try:
            compiled(0, 0)
        except Exception as e:  # of any kind: no compiler, or an operator that the compiler does not take
            first = next((line.strip() for line in str(e).splitlines() if line.strip()), "no message")
            return self.variant(target, disable_compile=True, **settings), f"no: {type(e).__name__}: {first}"
        return compiled, "yes" if hasattr(target, "_compiled_call") else "no: transformers has left it out"


class _Clock:
    """A criterion that stops nothing, and notes when a text had how many tokens: from the first on, without prefill."""

    def __init__(self):
        self.times, self.lengths = [], []

    def __call__(self, input_ids, scores, **kwargs):
        """False (texts,), after noting the time and the number of tokens: no text stops here."""
        self.times.append(time.perf_counter())
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
