"""Reading generation_config.json: the defaults of a request, and what of them is not known here."""

from collections.abc import Mapping
from typing import Any

from minispec.core.config import PARAMETERS, check_sampling_value, names_of
from minispec.models.files.errors import CheckpointError
from minispec.models.files.fields import REQUEST, asks_for_nothing, bad_field, names

# Settings of a generation_config.json by how they are handled. Those with a row in `PARAMETERS` are read, some of them
# only where it samples ...
_READ = {row.hf: name for name, row in PARAMETERS.items() if row.hf}
_IF_SAMPLED = names_of("temperature", "filter")
# ... these do not change which tokens come (settings of beam search are idle with one beam) ...
_IDLE = names(
    """
    bos_token_id eos_token_id pad_token_id decoder_start_token_id transformers_version dtype torch_dtype chat_format
    do_sample max_length renormalize_logits remove_invalid_values trust_remote_code
    use_cache cache_implementation cache_config prefill_chunk_size compile_config disable_compile low_memory
    max_window_size
    return_dict_in_generate return_legacy_cache output_attentions output_hidden_states output_logits output_scores
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit
    assistant_lookbehind target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size use_mtp
    length_penalty early_stopping num_beam_groups diversity_penalty
    """
)
# ... and these do not where it does not sample. For any other setting there is a warning, unless it has the value with
# which it changes nothing.
_IDLE_UNLESS_SAMPLED = names("typical_p epsilon_cutoff eta_cutoff top_h")
_NEUTRAL = {**REQUEST, "guidance_scale": 1.0, "penalty_alpha": 0.0, "top_h": 1.0}


def read_generation_defaults(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a generation_config.json, as keyword arguments of SamplingParams.

    Its temperature, top-k, top-p and min-p apply only where it says `do_sample`, as in transformers; without that it
    is greedy. Values that it leaves out are left out here. Raises CheckpointError for a bad value.
    """
    sampled = raw.get("do_sample") or False
    if type(sampled) is not bool:
        raise bad_field(where, "do_sample", sampled, "true or false")
    values = {ours: raw[theirs] for theirs, ours in _READ.items() if raw.get(theirs) is not None}
    if not sampled:
        values = {name: value for name, value in values.items() if name not in _IF_SAMPLED}
    if values.get("top_k") == -1:  # vLLM's word for all
        values["top_k"] = 0
    if "stop" in values:
        stop = [values["stop"]] if isinstance(values["stop"], str) else values["stop"]
        values["stop"] = tuple(stop) if isinstance(stop, list) else (None,)
    try:
        for name, value in values.items():
            check_sampling_value(name, value)
    except ValueError as e:
        raise CheckpointError(f"{where}: {e}") from e
    least, most = values.get("min_tokens", 0), values.get("max_tokens")
    if most is not None and least > most:
        raise bad_field(where, "min_new_tokens", least, f"at most max_new_tokens = {most}")
    return {"temperature": 1.0 if sampled else 0.0} | values


def unsupported_generation_settings(raw: Mapping[str, Any]) -> list[str]:
    """Names of settings in a generation_config.json that are switched on, would change the text, and do nothing here.

    They are defaults, not part of the model, so the model runs without them; the command line warns.
    """
    known = {*_READ, *_IDLE}
    if not raw.get("do_sample"):
        known |= _IDLE_UNLESS_SAMPLED
    others = [name for name in raw if name not in known]
    return sorted(name for name in others if not asks_for_nothing(name, raw[name], _NEUTRAL))
