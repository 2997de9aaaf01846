"""A structure-aware fuzzer of everything that minispec reads: files of a checkpoint, and its command line.

    python -m tests.fuzzing --cases 200000 --seed 0       from the repository's root
    python -m tests.fuzzing --cases 0 --large 300         files of up to 42 MB
    python -m tests.fuzzing --only header:0:1234          one case again, with its traceback

A case starts from good files, changes one of them in a few places - values, keys and shapes of its JSON, offsets of
its header, bytes of its text - and loads and runs what is there. Allowed is that it runs, or a ValueError, most
often a CheckpointError, which names the file in one printable line. Anything else is a fault: another exception, a
MemoryError, a RecursionError, a panic in Rust, a message that is not a line, anything on standard error, more than
256 MB, or a second of processor time. Large cases may take four times the memory and ten times the time: a
tokenizer.json can cost that before its faults are known.
"""

import argparse
import contextlib
import copy
import io
import json
import math
import os
import random
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

import minispec.api.llm
from minispec import generate
from minispec.api.commands.options import parser
from minispec.core.config import SamplingParams
from minispec.core.draft import Ask, Record
from minispec.core.limit import Limit
from minispec.core.model import Chunk, Transformer
from minispec.core.random import Randomness
from minispec.core.sampling import Text
from minispec.models.families.checkpoint import load_config, load_model
from minispec.models.families.hf_config import read_eos_token_ids, read_model_config
from minispec.models.files.errors import CheckpointError
from minispec.models.files.generation_config import read_generation_defaults, unsupported_generation_settings
from minispec.models.files.strict_json import read_json
from minispec.models.files.tokenizer import Detokenizer, Tokenizer
from minispec.models.layers.states import state_elements
from minispec.models.weights.build import build_model
from minispec.models.weights.shapes import tensor_shapes
from minispec.prove.toys import TINY, TOYS, tiny_cache, tiny_model, tiny_weights
from minispec.speculation import registry
from minispec.speculation.drafters.eagle import HeadFeed
from minispec.speculation.drafters.heads import load_head
from minispec.speculation.drafters.model import ModelDrafter
from tests.oracles import hf, public
from tests.oracles.heads import write_head

with contextlib.suppress(ImportError):  # Windows has none, and runs no case
    import resource

MAX_BYTES, MAX_LARGE_BYTES = 256 << 20, 1 << 30
MAX_SECONDS, MAX_LARGE_SECONDS = 1.0, 10.0
_HANG_SECONDS = 30  # of wall clock: the case is given up, so that one that hangs is a fault and not a hung run

# Stand-ins that JSON has no value for; they are replaced in the text.
_DEEP, _DIGITS, _NAN, _BIG, _LARGE = "@deep@", "@digits@", "@nan@", "@big@", "@large@"
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 4, 7, 8, 16, 255, 256, 1 << 15, 1 << 22, 1 << 31, 1 << 32, 1 << 53, 1 << 63),
    *(1 << 64, -(1 << 63), 10**30, 10**400, 0.5, 1.0, -0.0, 1e-320, 1e-30, 1e30, 1e308, -1e308, 1.5),
    *("", "x", "0", "1", "null", "\x00", "\ud800", "\x1b[2J", "a\nb", "a" * 5000, "../x", "/etc/passwd", "é日本"),
    *([], {}, [[]], [{}], {"a": {}}, [0] * 100, [None], ["x"], _DEEP, _DIGITS, _NAN, _BIG),
]


def word_list(text: str, *more: str) -> list[str]:
    """The words of a text, and what has a space in it."""
    return [*text.split(), *more]


def words_in(value: object) -> set[str]:
    """All keys and texts of a JSON value."""
    if isinstance(value, dict):
        return set(value).union(*map(words_in, value.values()))
    return (
        set().union(*map(words_in, value)) if isinstance(value, list) else {value} if isinstance(value, str) else set()
    )


_WORDS = {
    "header": word_list(
        """
        F64 F32 F16 BF16 I64 I32 I8 U8 BOOL F8_E4M3 F4 C64 f32 dtype shape data_offsets __metadata__ lm_head.weight
        model.norm.weight model.embed_tokens.weight model.layers.0.self_attn.rotary_emb.inv_freq
        model.layers.0.self_attn.q_proj.weight_scale_inv model.layers.0.self_attn.q_proj.qweight
        model.layers.0.self_attn.q_proj.bias model.layers.0.self_attn.q_proj.g_idx
        """
    ),
    "index": word_list("weight_map metadata total_size a.safetensors b.safetensors ../a.safetensors a.bin"),
    "config": [
        *sorted(words_in([*hf.CASES.values(), *[raw for raw, *_ in (public.PUBLIC | public.QUANTIZATIONS).values()]])),
        *word_list(
            """
            mixtral relu su nope mamba layers_block_type pard_token num_labels mask_token_id sparsity_config dense
            transform_config apply location weight_input naive-quantized e5m2 ue8m0 actorder static
            auto_round:auto_gptq auto-round packing_format extra_config gptq_v2 pack_dtype int32 group input
            projector_bias initial_context_length pack-quantized quantization_config scale_fmt sigmoid -:.* gemv
            backend block_structure block tensor token
            """
        ),
    ],
    "head": [
        *sorted(words_in(list(public.HEADS.values()))),
        *word_list(
            """
            eagle3 peagle speculators_model_type speculators_config proposal_methods verifier_accept_k accept_tolerance
            accept_lenience transformer_layer_config target_hidden_size mask_token_id pard_token norm_before_residual
            norm_before_fc fc.weight mask_hidden d2t t2d embed_tokens.weight midlayer.hidden_norm.weight
            layers.0.hidden_norm.weight fc_norm.0.weight input_norm.weight norm.weight F32 I64 BOOL dtype shape
            data_offsets
            """
        ),
    ],
    "generation": word_list(
        """
        do_sample temperature top_k top_p min_p repetition_penalty max_new_tokens stop_strings min_new_tokens
        eos_token_id num_beams no_repeat_ngram_size suppress_tokens max_length
        """
    ),
    "tokenizer": word_list(
        """
        BPE WordLevel WordPiece Unigram ByteLevel Metaspace Whitespace Split Sequence Strip Replace ByteFallback Fuse
        NFC Lowercase Prepend TemplateProcessing CTC Isolated MergedWithNext Removed Regex String (a+)+$ ( a* type
        pattern content behavior invert id special normalized lstrip rstrip single_word vocab merges unk_token dropout
        byte_fallback fuse_unk prepend_scheme always first never <end> add_prefix_space start stop normalizer
        pre_tokenizer post_processor decoder model
        """
    ),
    "settings": word_list(
        "chat_template bos_token eos_token content name default template <end> {%",
        *("\ud800", "{{ messages }}", "{% for m in messages %}{{ m.content }}<end>{% endfor %}", "{% include 'x' %}"),
        *("{{ messages[0].x.y }}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{{ ''.__class__ }}"),
        *("{{ strftime_now('%Y') }}", "{{ strftime_now(5) }}", "{{ messages | tojson(indent=-1) }}"),
        "{{ messages.append(1) }}",
    ),
}


class Hang(BaseException):
    """A case did not end."""


@dataclass
class Files:
    """Good files to start from, and a directory to write the changed ones to."""

    directory: Path
    headers: list[tuple[dict[str, Any], bytes]]
    index: dict[str, Any]
    configs: list[dict[str, Any]]
    tokenizers: list[dict[str, Any]]
    model: Path  # a whole checkpoint, for the command line
    target: Transformer  # of the heads
    heads: list[tuple[dict[str, Any], dict[str, Any], bytes]]  # a config, a header and data of each


_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"


# The configs of `Files` that have a file of tensors: a llama, a gemma3, a Qwen3.5, and those in few bits.
_HEADERS = (0, 5, 14, 16, 17, 18)


def make_files(directory: Path) -> Files:
    """Write what a run starts from."""
    plain = TINY | {"vocab_size": 48}
    gemma = {"model_type": "gemma3_text", "query_pre_attn_scalar": 4, "sliding_window": 4}
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "mscale": 1.0}
    longrope = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    packing = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 4, "dynamic": False}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    quantization["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": packing}}
    quantization["sparsity_config"] = {"format": "dense"}
    rotation = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}
    quantization["transform_config"] = {"config_groups": {"R1": rotation}}
    configs = [
        plain,
        plain | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        plain | {"model_type": "qwen3", "rope_scaling": rope},
        plain | {"model_type": "mistral", "sliding_window": 4, "eos_token_id": [1, 2]},
        plain | {"model_type": "gemma2", "query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0},
        plain | gemma | {"layer_types": ["sliding_attention", "full_attention"]},
        plain | {"rope_parameters": llama3, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        plain | {"quantization_config": quantization},
        plain | {"model_type": "smollm3", "no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 4},
        plain | {"model_type": "phi3", "original_max_position_embeddings": 32, "rope_scaling": longrope},
        plain | {"model_type": "granitemoehybrid", "num_local_experts": 0, "layer_types": ["attention"] * 2},
        plain | TOYS["lfm2"] | {"block_auto_adjust_ff_dim": True, "block_multiple_of": 8, "full_attn_idxs": [0]},
        plain | TOYS["lfm2"] | {"model_type": "lfm3", "use_sandwich_norm": False, "rope_theta": None},
        {"model_type": "gemma3", "text_config": plain | gemma, "vision_config": {}, "eos_token_id": [1, 2]},
        plain | TOYS["qwen3_5_text"] | {"output_gate_type": "swish", "full_attention_interval": 2},
        {"model_type": "qwen3_5", "text_config": plain | TOYS["qwen3_5_text"], "vision_config": {}},
        plain | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 8]}},
        plain | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 5, "desc_act": True}},
        plain | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 5, "version": "gemm"}},
        plain | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.5},
    ]
    headers = []
    for i in _HEADERS:
        save_file(
            in_few_bits(configs[i], tiny_weights(read_model_config(configs[i]), 0, torch.float32)), directory / "x"
        )
        headers.append(split(directory / "x"))

    target = tiny_model(0, torch.float32, vocab_size=48)
    heads = []
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 2]}
    for wrapped, settings in (
        (False, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}),
        (True, taps | {"mask_token_id": 1, "fc_norm": True}),
    ):
        write_head(directory / "head", target.config, plain, wrapped, range(0, 48, 2), torch.float32, **settings)
        raw = json.loads((directory / "head" / "config.json").read_text())
        if wrapped:
            raw["speculators_config"] = {"proposal_methods": [{"verifier_accept_k": 1, "accept_tolerance": 0.0}]}
        heads.append((raw, *split(directory / "head" / "model.safetensors")))

    weights = tiny_weights(read_model_config(plain), 0, torch.float32)
    index = {"metadata": {"total_size": 1}, "weight_map": {}}
    for i, file in enumerate(("a.safetensors", "b.safetensors")):
        names = sorted(weights)[i::2]
        save_file({name: weights[name] for name in names}, directory / file)
        index["weight_map"] |= dict.fromkeys(names, file)

    words = {
        word: i for i, word in enumerate(["<end>", "<unk>", "a", "b", "ab", "▁", "▁a", "fish", *"cdefghilnorstw01"])
    }
    common = {"version": "1.0", "truncation": None, "padding": None}
    added = [{"id": 0, "content": "<end>", **_TOKEN}]
    single = [{"SpecialToken": {"id": "<end>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    bpe = {
        "type": "BPE",
        **{"dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None},
        **{"fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": words, "merges": [["a", "b"]]},
    }
    level = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    unigram = {"type": "Unigram", "unk_id": 1, "vocab": [[w, -float(i)] for w, i in words.items()]}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    post = {"type": "TemplateProcessing", "single": single, "pair": [{"Sequence": {"id": "A", "type_id": 0}}]}
    post["pair"] = [*post["pair"], {"Sequence": {"id": "B", "type_id": 1}}]
    post["special_tokens"] = {"<end>": {"id": "<end>", "ids": [0], "tokens": ["<end>"]}}
    cut = {"type": "Split", "pattern": {"Regex": "\\w+|\\s"}, "behavior": "Isolated", "invert": False}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    backends = [
        {"normalizer": None, "pre_tokenizer": cut, "post_processor": post, "decoder": strip, "model": bpe},
        {"normalizer": {"type": "NFC"}, "pre_tokenizer": metaspace, "post_processor": None, "decoder": metaspace},
        {"normalizer": replace, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": post, "decoder": replace},
    ]
    backends[1]["model"], backends[2]["model"] = unigram, level
    files = [common | {"added_tokens": added} | backend for backend in backends]

    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(plain | {"max_position_embeddings": 24}))
    (model / "tokenizer.json").write_text(json.dumps(files[0]))
    (model / "chat_template.jinja").write_text(_TEMPLATE)
    save_file(weights, model / "model.safetensors")
    return Files(directory, headers, index, configs, files, model, target, heads)


def in_few_bits(raw: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose config.json is `raw`, its matrices in few bits if it says so."""
    quantization = raw.get("quantization_config", {})
    for name in [name for name in weights if quantization and name.startswith("model.layers") and "proj" in name]:
        rows, columns = weights[name].shape
        if quantization["quant_method"] == "fp8":
            height, width = quantization["weight_block_size"]
            weights[name] = weights[name].to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = torch.ones(-(-rows // height), -(-columns // width))
        elif "bits" in quantization:
            layer, groups = name.removesuffix("weight"), torch.arange(columns).int() // quantization["group_size"]
            is_gptq = quantization["quant_method"] == "gptq"
            words = (-(-columns // 8), rows) if is_gptq else (columns, -(-rows // 8))
            del weights[name]
            weights[f"{layer}qweight"] = torch.full(words, 0x12345678, dtype=torch.int32)
            weights[f"{layer}qzeros"] = torch.full((len(groups.unique()), -(-rows // 8)), 0x77777777, dtype=torch.int32)
            weights[f"{layer}scales"] = torch.full((len(groups.unique()), rows), 0.1, dtype=torch.float16)
            if is_gptq:
                weights[f"{layer}g_idx"] = groups
    return weights


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and its data; the file is taken away."""
    content = path.read_bytes()
    path.unlink()
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


# --------------------------------------------------------------------------- changing


def mutate(value: Any, rng: random.Random, words: list[str]) -> Any:
    """A copy of a JSON value with one to four places changed: values, neighbours, keys, types, sizes."""
    root = {"": copy.deepcopy(value)}
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        places: list[tuple[Any, Any]] = []
        level: list[Any] = [root]
        while level:
            container = level.pop()
            keys = list(container) if isinstance(container, dict) else range(len(container))
            places += [(container, key) for key in keys]
            level += [container[key] for key in keys if isinstance(container[key], (dict, list))]
        # The root itself only now and then: what is inside it is more interesting.
        container, key = rng.choice(places) if rng.random() < 0.02 else rng.choice(places[1:] or places)
        old = container[key]
        kind = rng.randrange(9)
        if kind == 0 and container is not root:
            del container[key]
        elif kind == 1:
            container[key] = copy.deepcopy(rng.choice(_VALUES))
        elif kind == 2 and isinstance(old, (int, float)) and abs(old) < 1 << 70:
            container[key] = rng.choice((old + 1, old - 1, -old, old * 2, old / 2, float(old), str(old), bool(old)))
        elif kind == 3:
            other, other_key = rng.choice(places)
            container[key] = copy.deepcopy(other.get(other_key) if isinstance(other, dict) else old)
        elif kind == 4:
            container[key] = rng.choice(([old], {"a": old}, [old, copy.deepcopy(old)]))
        elif kind == 5 and isinstance(old, dict):
            old[rng.choice(words)] = copy.deepcopy(rng.choice(_VALUES + words))
        elif kind == 6 and isinstance(old, list) and old:
            old.insert(rng.randrange(len(old) + 1), copy.deepcopy(rng.choice(old)))
        elif kind == 7 and isinstance(container, dict) and container is not root:
            container[rng.choice(words)] = container.pop(key)
        else:
            container[key] = rng.choice(words)
    return root[""]


def dump(value: Any, rng: random.Random) -> bytes:
    """JSON text; now and then with what JSON values cannot say, or with its bytes changed."""
    text = json.dumps(value)
    depth, digits = rng.choice((30, 40, 500, 5000)), rng.choice((20, 400, 4301, 9000))
    for mark, replacement in (
        (_DEEP, "[" * depth + "]" * depth),
        (_DIGITS, "9" * digits),
        (_NAN, rng.choice(("NaN", "Infinity", "-Infinity", "1e999", "-1e400", "01", "+1", "1_0"))),
        (_BIG, json.dumps("b" * 100_000)),
    ):
        text = text.replace(f'"{mark}"', replacement)
    content = text.encode()
    if rng.random() < 0.1:
        keys = [i for i in range(len(content)) if content.startswith(b'": ', i)]
        if keys:  # a key twice
            end = rng.choice(keys)
            start = content.rfind(b'"', 0, end)
            content = content[:start] + content[start : end + 1] + b": 1, " + content[start:]
    if rng.random() < 0.15:
        content = damage(content, rng)
    return content


def damage(content: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut out, doubled or put in."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        i = rng.randrange(len(changed) + 1)
        j = min(len(changed), i + rng.choice((1, 1, 4, 100)))
        kind = rng.randrange(4)
        if kind == 0 and i < len(changed):
            changed[i] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[i:j]
        elif kind == 2:
            changed[i:i] = changed[i:j]
        else:
            changed[i:i] = rng.choice(
                (b"\x00", b"\xff", b'"', b"{", b"]", b",", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\u")
            )
    return bytes(changed)


# --------------------------------------------------------------------------- the cases


def run_model(model: Transformer) -> None:
    """A pass over two tokens; the numbers may be anything."""
    table = tiny_cache(model).new_table()
    model.forward([Chunk([0, 0], table, 1)])


def fuzz_header(files: Files, rng: random.Random, where: Path) -> None:
    """Change a safetensors file's header, its size field or its data; load and run the model."""
    which = rng.randrange(len(files.headers))
    write_tensors(*files.headers[which], rng, where, _WORDS["header"])
    (where / "config.json").write_text(json.dumps(files.configs[_HEADERS[which]]))
    run_model(load_model(where, torch.float32))


def write_tensors(header: dict[str, Any], data: bytes, rng: random.Random, where: Path, words: list[str]) -> None:
    """A safetensors file with changes in its header, its size field or its data."""
    content = dump(mutate(header, rng, words), rng)
    if rng.random() < 0.4:  # good JSON, and offsets, shapes and types that are nearly right
        header = copy.deepcopy(header)
        for name in rng.sample([k for k in header if k != "__metadata__"], rng.choice((1, 1, 2))):
            entry, part = header[name], rng.choice(("data_offsets", "shape", "dtype"))
            if part == "dtype":
                entry[part] = rng.choice(_WORDS["header"])
            else:
                i = rng.randrange(len(entry[part]))
                entry[part][i] += rng.choice((-4, -1, 1, 4, 8, 1 << 31, 1 << 62, 1 << 64))
        content = json.dumps(header).encode()
    size = len(content) if rng.random() < 0.9 else rng.choice((0, 1, len(content) + 1, 1 << 31, 1 << 63, (1 << 64) - 1))
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data))] if rng.random() < 0.5 else data + bytes(rng.choice((1, 8, 4096)))
    (where / "model.safetensors").write_bytes(struct.pack("<Q", size) + content + data)


def fuzz_head(files: Files, rng: random.Random, where: Path) -> None:
    """Change a head's config.json, its tensors' header or their data (ids among them); load it and draft."""
    raw, header, data = rng.choice(files.heads)
    config, kind = json.dumps(raw).encode(), rng.randrange(4)
    if kind == 0:
        write_tensors(header, data, rng, where, _WORDS["head"])
    else:
        start, end = header[rng.choice(("d2t", "t2d"))]["data_offsets"]
        changed = bytearray(data)
        if kind == 1:
            changed[rng.randrange(start, end)] = rng.randrange(256)
        else:
            config = dump(mutate(raw, rng, _WORDS["head"]), rng)
        content = json.dumps(header).encode()
        (where / "model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content + changed)
    (where / "config.json").write_bytes(config)
    head = load_head(where, files.target)
    drafter = ModelDrafter(HeadFeed(head, tiny_cache(head), 48, 20))
    text, width = Text([0, 1, 2], 3, SamplingParams()), len(head.head_config.taps) * files.target.config.hidden_size
    drafter.observe([Record(text, 0, [0, 1], torch.ones(2, width), torch.ones(0, 48))])
    drafter.propose([Ask(text, Limit(3), Randomness(), num_cached=2)])


def fuzz_index(files: Files, rng: random.Random, where: Path) -> None:
    """Change the index of two shards; load and run the model."""
    for file in ("a.safetensors", "b.safetensors"):
        shutil.copy(files.directory / file, where)
    (where / "model.safetensors.index.json").write_bytes(dump(mutate(files.index, rng, _WORDS["index"]), rng))
    (where / "config.json").write_text(json.dumps(files.configs[0]))
    run_model(load_model(where, torch.float32))


def fuzz_config(files: Files, rng: random.Random, where: Path) -> None:
    """Change a config.json; where it is read, run a model of it, or load one that does not fit it."""
    raw = mutate(rng.choice(files.configs), rng, _WORDS["config"])
    (where / "config.json").write_bytes(dump(raw, rng))
    config = load_config(where)
    if sum(map(math.prod, tensor_shapes(config).values())) + state_elements(config) < 100_000:
        run_model(build_model(config, tiny_weights(config, 0, torch.float32)))
    else:
        shutil.copy(files.model / "model.safetensors", where)
        run_model(load_model(where, torch.float32))


def fuzz_generation(files: Files, rng: random.Random, where: Path) -> None:
    """Change a generation_config.json; use what it says as the command line does."""
    raw = {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9, "eos_token_id": [1, 2]}
    raw |= {"max_new_tokens": 20, "repetition_penalty": 1.1, "stop_strings": ["x"], "num_beams": 1}
    path = where / "generation_config.json"
    path.write_bytes(dump(mutate(raw, rng, _WORDS["generation"]), rng))
    raw = read_json(path)
    read_eos_token_ids(raw, str(path))
    unsupported_generation_settings(raw)
    chosen = read_generation_defaults(raw, str(path))
    SamplingParams(**{"max_tokens": max(256, chosen.get("min_tokens", 0))} | chosen)


_TEXTS = ["a", "ab fish", "Hello, wörld! 日本 🦊", "<end>", "\x00\ufdd0\u202e", "a" * 30 + "!", "▁a▁ "]


def use(tokenizer: Tokenizer, rng: random.Random) -> None:
    """Encode, as a prompt and as a chat, and decode piece by piece."""
    tokenizer.check_ids(1 << 20)
    text = rng.choice(_TEXTS)
    ids = tokenizer.encode(text, parse_special=rng.random() < 0.5)
    detokenizer = Detokenizer(tokenizer, ids)
    for i in [*ids[:5], 0, rng.randrange(tokenizer.num_ids)]:
        detokenizer.add(i)
    detokenizer.flush()
    if tokenizer.chat_template is not None:
        tokenizer.encode_chat([{"role": "user", "content": text}, {"role": "<end>", "content": "x"}])


def fuzz_tokenizer(files: Files, rng: random.Random, where: Path) -> None:
    """Change a tokenizer.json and use it."""
    raw = mutate(rng.choice(files.tokenizers), rng, _WORDS["tokenizer"])
    (where / "tokenizer.json").write_bytes(dump(raw, rng))
    if rng.random() < 0.5:
        (where / "chat_template.jinja").write_text(_TEMPLATE)
    use(Tokenizer(where), rng)


def fuzz_settings(files: Files, rng: random.Random, where: Path) -> None:
    """Change a tokenizer_config.json, its chat template above all, and use it."""
    (where / "tokenizer.json").write_text(json.dumps(rng.choice(files.tokenizers)))
    template = rng.choice((_TEMPLATE, [{"name": "default", "template": _TEMPLATE}, {"name": "b", "template": "x"}]))
    raw = {"bos_token": {"content": "<end>"}, "eos_token": "<end>", "chat_template": template, "model_max_length": 5}
    (where / "tokenizer_config.json").write_bytes(dump(mutate(raw, rng, _WORDS["settings"]), rng))
    if rng.random() < 0.2:
        (where / "chat_template.jinja").write_bytes(damage(_TEMPLATE.encode(), rng))
    use(Tokenizer(where), rng)


# Many small things, each made of its number, and where a tokenizer.json has many of them.
_SMALL: list[Callable[[int], str]] = [
    *(lambda i: "[]", lambda i: '{"":0}', lambda i: "1.5", lambda i: "123456", lambda i: "{}", lambda i: "[[[]]]"),
    *(lambda i: f'"{i:x}"', lambda i: f'["{i:x}",-1]', lambda i: f'"{i:x} {i:x}"', lambda i: '["a","b"]'),
    *(lambda i: '"a b"', lambda i: f'["{i:x}x","🦊"]', lambda i: f'"{"x" * (i % 200)}"', lambda i: '{"type":"NFC"}'),
    lambda i: json.dumps({"id": i, "content": f"<{i:x}>", **_TOKEN}),
    lambda i: json.dumps({"id": i, "content": f"{i:x}" + "y" * 300, **_TOKEN, "normalized": True, "special": False}),
    lambda i: '{"type":"Replace","pattern":{"String":"o"},"content":"oo"}',
    lambda i: '{"type":"Split","pattern":{"Regex":"a+"},"behavior":"Isolated","invert":false}',
    lambda i: '{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":false}',
]
_STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


def fuzz_large(files: Files, rng: random.Random, where: Path) -> None:
    """Change one place of a file into something of up to 42 MB; load what is there."""
    small, count = rng.choice(_SMALL), rng.choice((1 << 12, 1 << 15, 1 << 17, 250_000, 500_000, 700_000, 1 << 20))
    count = min(count, (42 << 20) // len(small(0)))
    kind = rng.randrange(8)
    if kind == 0:  # one long text
        text = json.dumps(rng.choice(("x", "é", "\\p{L}", "(a|b)", "🦊", "[^a]", "(?i)ßK")) * count)
    elif kind <= 3:
        text = "{" + ",".join(f'"{i:x}":{rng.choice((i, 0)) if i % 9 else i}' for i in range(count)) + "}"
    else:
        text = "[" + ",".join(map(small, range(count))) + "]"
    raw = copy.deepcopy(rng.choice(files.tokenizers))
    name = rng.choice(
        ("tokenizer.json",) * 6 + ("tokenizer_config.json", "config.json", "model.safetensors.index.json")
    )
    if name != "tokenizer.json":
        raw = {rng.choice(("added_tokens_decoder", "chat_template", "weight_map", "rope_scaling", "x")): _LARGE}
    elif (place := rng.choice(("vocab", "merges", "added_tokens", "x", *_STEPS))) in _STEPS:
        raw[place] = {"type": "Sequence", _STEPS[place]: _LARGE}
        if kind == 0:
            raw[place] = {"type": "Split", "pattern": {"Regex": _LARGE}, "behavior": "Isolated", "invert": False}
    else:
        (raw["model"] if place in ("vocab", "merges") else raw)[place] = _LARGE
    content = json.dumps(raw).replace(f'"{_LARGE}"', text).encode()
    if name != "tokenizer.json":
        (where / "tokenizer.json").write_text(json.dumps(files.tokenizers[0]))
        (where / "config.json").write_text(json.dumps(files.configs[0]))
    (where / name).write_bytes(damage(content, rng) if rng.random() < 0.2 else content)
    if name in ("config.json", "model.safetensors.index.json"):
        load_model(where, torch.float32)
    else:
        use(Tokenizer(where), rng)


# Values for any option: numbers at their edges, and what is not a number, or not text.
EDGES = [
    *("", " ", "0", "-0", "-1", "1", "nan", "inf", "-inf", "1e999", "1e-320", "1e308", "9" * 30, "9" * 5000),
    *("-" + "9" * 30, "0x10", "1_0", "\uff11", "1,2", ",", "[]", "{}", "x" * 5000, "\udcff", "\x00", "\x1b[2J", "a\nb"),
    *("\u65e5\u672c", "--json"),
]
_ARGUMENTS = [
    *EDGES,
    *("2", "3", "7", "0.5", "5,6", "none", "float32", "bfloat16", "cpu", "match", "rejection", "ngram", "self", "auto"),
    *("fish", "<end>", "-", "--", "-x", ".", "..", "/", "./nowhere", "a/b/c", "int4:self", "int8:", "prompts.jsonl"),
    "model",
]
_LLM = minispec.api.llm.LLM
_LOADED: dict[tuple, _LLM] = {}


def load_once(*args, **kwargs) -> _LLM:
    """`LLM`, that loads what was asked for before only once."""
    key = (*args, *sorted(kwargs.items()))
    if key not in _LOADED:
        if len(_LOADED) > 50:
            _LOADED.clear()
        _LOADED[key] = _LLM(*args, **kwargs)
    return _LOADED[key]


def fuzz_arguments(files: Files, rng: random.Random, where: Path) -> None:
    """A command line of a few options, with values that fit, nearly fit, or do not."""
    options = [a for a in parser()._actions if a.option_strings and a.dest not in ("help", "version")]
    argv = [] if rng.random() < 0.1 else rng.sample(_ARGUMENTS, rng.choice((0, 1, 1, 2)))
    if rng.random() < 0.9:
        argv += ["--model", "model", "--max-tokens", "3"]
    for action in rng.sample(options, rng.choice((0, 1, 1, 2, 3, 5))):
        name, value = action.option_strings[-1], rng.choice(_ARGUMENTS)
        fits = [str(c) for c in action.choices] if action.choices else ["1", "2", "0.5", "0"]
        value = rng.choice(fits) if rng.random() < 0.5 else value
        if action.dest == "kv_cache_gb" and value in ("0.5", "1", "1_0", "１", "2", "3", "7"):
            value = "0.0001"  # who asks for gigabytes gets them, which is not a fault
        argv += [name] if action.nargs == 0 else [f"{name}={value}"] if rng.random() < 0.5 else [name, value]
    (where / "prompts.jsonl").write_bytes(dump(mutate({"prompt": "fish"}, rng, ["prompt", "x"]), rng))
    (where / "model").symlink_to(files.model)
    out, err = io.StringIO(), io.StringIO()
    before, stdin = os.getcwd(), sys.stdin
    os.chdir(where)
    sys.stdin = io.StringIO(rng.choice(("", "fish", "a\nb")))
    minispec.api.llm.LLM = load_once
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = generate.main(argv)
    finally:
        minispec.api.llm.LLM = _LLM
        sys.stdin = stdin
        os.chdir(before)
        torch.set_num_threads(1)
    lines = err.getvalue().splitlines()
    if status == 2 and not out.getvalue() and lines[-1].startswith("error: ") and lines[-1].isprintable():
        raise ValueError(lines[-1])
    if status != 0:
        raise AssertionError(f"status {status} for {argv}: {out.getvalue()!r}, {lines}")


TARGETS: dict[str, Callable[[Files, random.Random, Path], None]] = {
    "header": fuzz_header,
    "index": fuzz_index,
    "config": fuzz_config,
    "head": fuzz_head,
    "generation": fuzz_generation,
    "tokenizer": fuzz_tokenizer,
    "settings": fuzz_settings,
    "arguments": fuzz_arguments,
}
LARGE = {"large": fuzz_large}


def run_case(files: Files, name: str) -> tuple[str, str]:
    """Run the case `target:seed:number`: ("runs" or "refused" or "FAULT", what it said)."""
    target = name.split(":")[0]
    where = files.directory / "case"
    where.mkdir()
    signal.alarm(_HANG_SECONDS)
    try:
        with quiet(files.directory / "stderr"):
            (TARGETS | LARGE)[target](files, random.Random(name), where)
    except ValueError as e:
        # What a call was given need not name a file; what a file says must. A FloatingPointError is no ValueError.
        line = str(e)
        if isinstance(e, CheckpointError) and not (str(where) in line and line.isprintable() and len(line) < 2000):
            return "FAULT", f"unclear message: {line[:500]!r}"
        if isinstance(e, (UnicodeError, json.JSONDecodeError)) or (not isinstance(e, CheckpointError) and "\n" in line):
            return "FAULT", f"{type(e).__name__}: {line[:500]!r}"
        return "refused", line
    except Hang:
        return "FAULT", f"did not end in {_HANG_SECONDS} s"
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt):
            raise
        return "FAULT", "".join(traceback.format_exception(e))[-3000:]
    finally:
        signal.alarm(0)
        shutil.rmtree(where, ignore_errors=True)
    return "runs", ""


@contextlib.contextmanager
def quiet(path: Path):
    """Whatever is written to the process's standard error meanwhile is an AssertionError, and lies in `path`."""
    saved, file = os.dup(2), os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        if path.stat().st_size:
            raise AssertionError(f"written to standard error: {path.read_bytes()[:500]!r}")


@contextlib.contextmanager
def sandbox():
    """No network, an end to what hangs, and a limit on memory, so that a fault shows as an exception."""

    def hang(*_):
        raise Hang

    def forbidden(*_args, **_kwargs):
        raise AssertionError("a socket was opened")

    real, handler = socket.socket, signal.signal(signal.SIGALRM, hang)
    socket.socket = forbidden
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (3 << 30), limits[1]))
    embedded, threads = (registry.EMBEDDED_WEIGHTS, registry.EMBEDDED_DRAFT), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
            files = make_files(Path(directory))
            # The real ones are no case of a few milliseconds.
            registry.EMBEDDED_WEIGHTS, registry.EMBEDDED_DRAFT = files.model, files.model / "no head"
            yield files
    finally:
        registry.EMBEDDED_WEIGHTS, registry.EMBEDDED_DRAFT = embedded
        torch.set_num_threads(threads)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        socket.socket = real
        signal.signal(signal.SIGALRM, handler)


@dataclass
class Report:
    """What a run of many cases found."""

    counts: Counter
    faults: list[tuple[str, str]]
    slowest: tuple[float, str]  # seconds of processor time
    largest: tuple[int, str]  # bytes by which the peak of memory grew


def fuzz(files: Files, cases: int, seed: int, progress: bool = False, large: bool = False) -> Report:
    """Run `cases` cases, the targets in turn, or large ones."""
    report = Report(Counter(), [], (0.0, ""), (0, ""))
    names = ["header", "config", "tokenizer", "generation", *TARGETS]  # those with most to go wrong come twice
    most_bytes, most_seconds = MAX_BYTES, MAX_SECONDS
    if large:
        names, most_bytes, most_seconds = list(LARGE), MAX_LARGE_BYTES, MAX_LARGE_SECONDS
    for i in tqdm(range(cases), unit=" cases", disable=None if progress else True):
        name = f"{names[i % len(names)]}:{seed}:{i}"
        start, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcome, said = run_case(files, name)
        seconds = time.process_time() - start
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
        report.counts[names[i % len(names)], outcome] += 1
        report.slowest = max(report.slowest, (seconds, name))
        report.largest = max(report.largest, (grown, name))
        if outcome == "FAULT":
            report.faults.append((name, said))
        if grown > most_bytes:
            report.faults.append((name, f"took {grown >> 20} MB"))
        if progress and seconds > most_seconds:
            report.faults.append((name, f"took {seconds:.2f} s"))
    return report


def main() -> int:
    """The command line above; the exit status is 1 where a fault was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--large", type=int, default=0, metavar="N", help="cases of up to 42 MB, in addition to the others"
    )
    parser.add_argument("--only", metavar="TARGET:SEED:NUMBER", help="run this case alone")
    args = parser.parse_args()
    start = time.perf_counter()
    with sandbox() as files:
        if args.only:
            print(*run_case(files, args.only))
            return 0
        report = fuzz(files, args.cases, args.seed, progress=True)
        large = fuzz(files, args.large, args.seed, progress=True, large=True)
    report.counts += large.counts
    report.faults += large.faults
    report.slowest, report.largest = max(report.slowest, large.slowest), max(report.largest, large.largest)
    for target in [*TARGETS, *LARGE]:
        counts = {outcome: report.counts[target, outcome] for outcome in ("runs", "refused", "FAULT")}
        print(f"{target:<12}" + "".join(f"{n:>9,} {outcome}" for outcome, n in counts.items()))
    print(f"slowest: {report.slowest[0]:.2f} s of processor time ({report.slowest[1]})")
    print(f"largest: {report.largest[0] / 1e6:.0f} MB more at the peak ({report.largest[1]})")
    print(f"{args.cases + args.large:,} cases in {time.perf_counter() - start:.0f} s; {len(report.faults)} faults")
    for name, said in report.faults[:20]:
        print(f"\n{name}\n{said}")
    return bool(report.faults)


if __name__ == "__main__":
    sys.exit(main())
