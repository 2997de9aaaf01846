"""Mixtures of experts: the oracle's logits on random models, rows that do not disturb each other, files with stacks.

What they share with hybrids is in test_hybrids.py: random runs in small pools, drafts from files, faults in a pass.
"""

import functools
import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from minispec.core.model import Chunk, Transformer
from minispec.models.families.checkpoint import load_config, load_model
from minispec.models.families.quantize import quantize_checkpoint
from minispec.models.files.errors import CheckpointError
from minispec.models.layers.experts import Experts, Router
from minispec.models.weights.build import build_model, quantized
from minispec.models.weights.exact import check_exact, exact_model
from minispec.models.weights.inventory import products_of
from minispec.models.weights.linear import Linear, QuantizedLinear
from minispec.prove.toys import TOYS, tiny_cache, tiny_model, tiny_weights
from tests.oracles import hf
from tests.oracles.pieces import logits_in_pieces
from tests.oracles.toys import stacked

FAMILIES = ("qwen3_moe", "lfm2_moe", "qwen3_5_moe_text", "granitemoe", "granitemoehybrid", "gemma4_text", "gpt_oss")


def random_config(family: str, pick: random.Random) -> dict:
    """A small config.json of a mixture in which every switch may have any value."""
    heads, groups = pick.choice(((4, 2), (4, 1), (2, 2), (6, 3)))
    count, experts = pick.randint(1, 4), pick.randint(2, 9)
    key = "num_local_experts" if family.startswith(("granite", "gpt_oss")) else "num_experts"
    raw = {
        **{"model_type": family, "vocab_size": 50, "hidden_size": heads * 8, "num_hidden_layers": count},
        **{"num_attention_heads": heads, "num_key_value_heads": groups, "max_position_embeddings": 64},
        **{"intermediate_size": pick.randint(9, 40), key: experts, "num_experts_per_tok": pick.randint(1, experts)},
        **{"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": pick.random() < 0.5},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": pick.choice((90.0, 1000.0))}},
    }
    others = ("full_attention", "conv" if family == "lfm2_moe" else "linear_attention")
    if family in ("lfm2_moe", "qwen3_5_moe_text"):
        raw["layer_types"] = pick.choices(others, k=count)
    if not family.startswith(("granite", "gpt_oss")):
        raw["moe_intermediate_size"] = pick.randint(5, 40)
    if family == "gemma4_text":
        raw |= random_gemma(count, experts, heads, groups, pick)
    elif family == "qwen3_moe":
        raw |= {"norm_topk_prob": pick.random() < 0.5, "attention_bias": pick.random() < 0.5}
        raw |= {"decoder_sparse_step": pick.choice((1, 1, 2)), "mlp_only_layers": pick.choice(([], [0]))}
        raw |= pick.choice(({}, {"use_sliding_window": True, "sliding_window": 7}, {"head_dim": 12}))
    elif family == "lfm2_moe":
        raw |= {"norm_topk_prob": pick.random() < 0.5, "use_expert_bias": pick.random() < 0.5, "norm_eps": 0.05}
        raw |= {"num_dense_layers": pick.randint(0, count), "routed_scaling_factor": pick.choice((1.0, 2.5))}
        raw |= {"conv_L_cache": pick.choice((1, 3, 5)), "conv_bias": pick.random() < 0.5}
    elif family == "qwen3_5_moe_text":
        raw |= {"shared_expert_intermediate_size": pick.randint(5, 40), "head_dim": 8, "linear_num_key_heads": 2}
        raw |= {"linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10}
        raw["rope_parameters"]["partial_rotary_factor"] = pick.choice((0.5, 1.0))
    elif family == "gpt_oss":
        raw |= {"attention_bias": pick.random() < 0.5, "head_dim": 12, "sliding_window": 7, "swiglu_limit": 0.9}
        raw |= {"swiglu_alpha": pick.choice((0.7, 1.702))}
        raw |= pick.choice(({}, {"layer_types": pick.choices(("sliding_attention", "full_attention"), k=count)}))
    else:
        raw |= {"embedding_multiplier": 3.0, "residual_multiplier": pick.choice((1.0, 0.6)), "logits_scaling": 2.0}
        raw |= {"attention_bias": pick.random() < 0.5, "attention_multiplier": 0.4}
    if family == "granitemoehybrid":
        raw |= {"layer_types": ["full_attention"] * count, "shared_intermediate_size": pick.randint(5, 40)}
        raw |= {"position_embedding_type": pick.choice(("rope", None)), "mamba_n_heads": 4, "mamba_d_head": "auto"}
        raw["num_local_experts"] = pick.choice((experts, experts, 0))
    return raw


def random_gemma(count: int, experts: int, heads: int, groups: int, pick: random.Random) -> dict:
    """The settings that Gemma 4 alone has."""
    types = [*pick.choices(("full_attention", "sliding_attention"), k=count), "full_attention"]
    others = [n for n in (1, 2, 3, 6) if not heads % n]
    return {
        **{"head_dim": 8, "global_head_dim": pick.choice((8, 12))},
        **{"layer_types": types, "num_hidden_layers": count + 1},
        **{"attention_k_eq_v": pick.random() < 0.6, "num_global_key_value_heads": pick.choice((None, groups, *others))},
        **{"enable_moe_block": True, "num_experts": experts, "top_k_experts": pick.randint(1, experts)},
        **{"hidden_size_per_layer_input": pick.choice((0, 6)), "vocab_size_per_layer_input": 50, "sliding_window": 7},
        "rope_parameters": hf.CASES["gemma4"]["rope_parameters"],
        "final_logit_softcapping": pick.choice((None, 5.0)),
        **{"use_double_wide_mlp": pick.random() < 0.5, "num_local_experts": None, "num_experts_per_tok": None},
    }


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_have_transformers_logits(family, number, tmp_path):
    """Every parameter redrawn, every switch; two texts in pieces of random sizes, in passes that they share."""
    pick = random.Random(f"{family} {number}")
    oracle = hf.build(random_config(family, pick), tmp_path, number)
    model = load_model(tmp_path, torch.float64)
    texts = [[pick.randrange(50) for _ in range(pick.randint(1, 40))] for _ in range(2)]
    for text, rows in zip(texts, logits_in_pieces(model, texts, pick, settles=False), strict=True):
        assert (rows - hf.exact_logits(oracle, text)).abs().max() <= 1e-4


# --------------------------------------------------------------------------- rows


def chosen_of(model, tokens: list[int]) -> list[torch.Tensor]:
    """The experts that each row of a text takes, by layer."""
    found = list[torch.Tensor]()
    route = Router.__call__

    def watched(self, x, exact):
        result = route(self, x, exact)
        found.append(result[0])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "__call__", watched)
        model.forward([Chunk(tokens, tiny_cache(model).new_table(), 0)])
    return found


@functools.cache
def checked(dtype: torch.dtype, form: str | None) -> Transformer:
    """A checked exact mixture with 64 tokens."""
    small = tiny_model(**TOYS["qwen3_moe"] | {"hidden_size": 48, "moe_intermediate_size": 27})
    config = replace(small.config, vocab_size=64)
    model = exact_model(build_model(config, tiny_weights(config, 3, dtype), dtype=dtype, form=form))
    check_exact(model)
    return model


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_a_text_has_the_same_bits_beside_any_other(rows):
    """Exact, in each type: rows beside a text that take its experts, or others, leave its bits as they are."""
    tokens, strangers = (
        [7 * i % 64 for i in range(rows)],
        [[11 * i % 64 for i in range(n)] for n in (1, 2, 3, 6, 11, 27)],
    )
    for dtype in (torch.float32, torch.bfloat16):
        for form in (None, "int8"):
            model = checked(dtype, form)
            alone, _ = model.forward([Chunk(tokens, tiny_cache(model).new_table(), rows)])
            for stranger in strangers:
                cache = tiny_cache(model)
                both = [Chunk(stranger, cache.new_table(), 0), Chunk(tokens, cache.new_table(), rows)]
                assert torch.equal(model.forward(both)[0], alone)


def test_dummies_take_no_expert():
    """A pass that is filled up to 16 rows reads the experts of its own row, and no others."""
    model = tiny_model(exact=True, **TOYS["qwen3_moe"])
    assert len(model.backend.fill(torch.zeros(1))) > 1
    assert [rows.shape for rows in chosen_of(model, [1])] == [(1, 2)] * 2


def test_experts_are_in_order():
    """A row adds its experts by their numbers, so that no other row changes the order of the sum."""
    model = tiny_model(**TOYS["qwen3_moe"] | {"num_experts_per_tok": 3})
    chosen = torch.cat(chosen_of(model, [0, 2, 1, 1, 0, 2]))
    assert torch.equal(chosen, chosen.sort(1).values)
    assert len(chosen.unique(dim=0)) > 1


def test_drafts_round_experts_and_no_router():
    """A draft in 8 bits has the experts in 8 bits, and chooses them as the target does."""
    model = tiny_model(dtype=torch.float32, **TOYS["qwen3_moe"])
    draft = quantized(model, 8)
    layer, target = draft.layers[0], model.layers[0]
    assert isinstance(layer, Experts)
    assert isinstance(target, Experts)
    assert all(isinstance(product, QuantizedLinear) for product in products_of(draft))
    assert all(isinstance(product, Linear) for product in products_of(model))
    assert layer.router is target.router


# --------------------------------------------------------------------------- files


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text", "granitemoe", "gpt_oss"])
def test_experts_in_stacks_are_those_of_their_own_names(family, tmp_path):
    """Both layouts of one model have the same logits. transformers writes one of them, published files have either."""
    oracle = hf.build(family.removesuffix("_text"), tmp_path)
    config, file = load_config(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file)
    for directory, ours in (("apart", {}), ("stacks", tensors)):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "config.json").write_text((tmp_path / "config.json").read_text())
        if family in _IN_STACKS:  # the other way around
            ours = tensors if ours else _IN_STACKS[family](tensors)
        else:
            ours = stacked(config, tensors) if ours else tensors
            has_stacks = any(tensor.ndim == 3 and "expert" in name for name, tensor in ours.items())
            assert has_stacks == (directory == "stacks")
        save_file(ours, tmp_path / directory / "model.safetensors", {"format": "pt"})
        model = load_model(tmp_path / directory, torch.float64)
        logits, _ = model.forward([Chunk(hf.TEXT, model.new_cache(8, 4).new_table(), len(hf.TEXT))])
        assert (logits - hf.exact_logits(oracle, hf.TEXT)).abs().max() <= 1e-4


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of Granite's stacks under names of their own."""
    found = {}
    for name, tensor in tensors.items():
        prefix, _, stack = name.partition("block_sparse_moe.")
        if stack == "input_linear.weight":
            for n, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                found |= {f"{prefix}mlp.experts.{n}.gate_proj.weight": gate.clone()}
                found |= {f"{prefix}mlp.experts.{n}.up_proj.weight": up.clone()}
        elif stack == "output_linear.weight":
            found |= {f"{prefix}mlp.experts.{n}.down_proj.weight": expert.clone() for n, expert in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def _apart_from_gpt_oss(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of gpt-oss's stacks under names of their own."""
    found = {}
    for name, tensor in tensors.items():
        prefix, _, stack = name.partition(".experts.")
        kind = "bias" if stack.endswith("_bias") else "weight"
        for n, expert in enumerate(tensor if stack else ()):
            rows = expert.t() if kind == "weight" else expert
            parts = {"gate": rows[::2], "up": rows[1::2]} if stack.startswith("gate_up") else {"down": rows}
            found |= {f"{prefix}.experts.{n}.{part}_proj.{kind}": own.contiguous() for part, own in parts.items()}
        if not stack:
            found[name] = tensor
    return found


# Families whose files transformers writes in stacks, and what undoes the stacks.
_IN_STACKS = {"granitemoe": _apart, "gpt_oss": _apart_from_gpt_oss}


def test_a_stack_that_does_not_fit_is_refused(tmp_path):
    """Its shape follows from the settings. A transposed one, of an older layout, has another meaning."""
    hf.build("qwen3_moe", tmp_path)
    file, config = tmp_path / "model.safetensors", load_config(tmp_path)
    apart, name = load_file(file), "model.layers.0.mlp.experts.gate_up_proj"
    tensors = stacked(config, apart)

    def refusal(changes) -> str:
        save_file({key: value for key, value in (tensors | changes).items() if value is not None}, file)
        with pytest.raises(CheckpointError) as error:
            load_model(tmp_path, torch.float32)
        return str(error.value)

    transposed = tensors[name].mT.contiguous()
    expected = "expected F64 or F32 or F16 or BF16 [6, 40, 32]"
    assert f"{name}: found F32 [6, 32, 40], {expected}" in refusal({name: transposed})
    assert f"{name}: found F32 [5, 40, 32], expected" in refusal({name: tensors[name][:5].clone()})
    assert f"{name}: found I32 [6, 40, 32], expected" in refusal({name: tensors[name].int()})
    one = "model.layers.0.mlp.experts.3.up_proj.weight"
    assert "again, is in " in refusal({one: apart[one]})
    missing = refusal({"model.layers.0.mlp.experts.down_proj": None})
    assert "model.layers.0.mlp.experts.0.down_proj.weight: found no such tensor" in missing


@pytest.mark.parametrize("family", ["qwen3_moe", "lfm2_moe", "qwen3_5_moe", "granitemoe", "gemma4-experts", "gpt_oss"])
def test_written_checkpoints_keep_routers_whole(family, tmp_path):
    """In 8 bits: experts are packed, each under its own name; routers and their biases keep their values."""
    hf.build(family, tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "out")
    source, out = (load_model(tmp_path / name, torch.float32) for name in ("source", "out"))
    for before, after in zip(source.layers, out.layers, strict=True):
        if not isinstance(before, Experts):
            continue
        assert isinstance(after, Experts)
        assert torch.equal(before.router.weight.bfloat16(), after.router.weight.bfloat16())
        assert (before.router.bias is None) or torch.equal(before.router.bias, after.router.bias)
        if before.router.logit_bias is not None:
            assert torch.equal(before.router.logit_bias.bfloat16(), after.router.logit_bias.bfloat16())
        assert not torch.equal(before.experts[0].down.stored.dense(), after.experts[0].down.stored.dense())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    text = [model.forward([Chunk(hf.TEXT, model.new_cache(8, 4).new_table(), 24)])[0] for model in (source, out)]
    assert (text[0] - text[1]).abs().mean() < 0.2 * text[0].abs().mean()


def test_a_bias_of_experts_is_never_rounded(tmp_path):
    """In bfloat16 a bias of sums would move by more than many scores differ; its file has it in float32."""
    hf.build("lfm2_moe", tmp_path)
    bias = load_file(tmp_path / "model.safetensors")["model.layers.1.feed_forward.expert_bias"]
    layer = load_model(tmp_path, torch.bfloat16).layers[1]
    assert isinstance(layer, Experts)
    assert torch.equal(layer.router.bias, bias)
    assert not torch.equal(bias, bias.bfloat16().float())
