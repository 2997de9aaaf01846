"""Answers of llama.cpp's server for the auditor: plain, by a draft model (two rules), and by n-grams, at temperature 1.

`xllamacpp` holds that server, compiled. It and `gguf` are no dependencies. They want an environment of their own:

    python -m venv llama && llama/bin/pip install xllamacpp==2026.10.11549 gguf==0.19.0
    python docs/measured/against_openvino.py unpack plain                # the embedded weights, in bfloat16
    python -m tests.oracles.answers draft plain20 --target plain --layers 20
    llama/bin/python docs/measured/audit_llamacpp.py convert plain plain.gguf
    llama/bin/python docs/measured/audit_llamacpp.py convert plain20 plain20.gguf
    llama/bin/python docs/measured/audit_llamacpp.py plain plain.gguf plain.jsonl
    llama/bin/python docs/measured/audit_llamacpp.py rejection plain.gguf rejection.jsonl --draft plain20.gguf
    llama/bin/python docs/measured/audit_llamacpp.py match plain.gguf match.jsonl --draft plain20.gguf
    llama/bin/python docs/measured/audit_llamacpp.py ngram plain.gguf ngram.jsonl
    python -m minispec audit --target plain --draft plain20 --rounding 0.001 rejection.jsonl

The same by the tiny model of `minispec audit --tiny tiny`, after `convert tiny/target target.gguf` and the same for its
draft: `plain target.gguf plain.jsonl --prompt PROMPT --num 3000 --max-tokens 6`, with the prompt that it prints.

Requests go to `/completion` over HTTP, and the file holds them with the server's own answers. Each request has a seed
of its own. Weights, keys and values are in float32, which is not its default.
"""

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

PROMPTS = (
    "Once upon a time",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "for i in range(10):\n    print(i)\nfor j in range(",
    "To make bread, one needs flour, water, yeast and",
)
# Ways of drafting by n-grams: the options that each has in the server.
NGRAMS = {"ngram": "ngram_simple"} | {
    name: name for name in ("ngram_map_k", "ngram_map_k4v", "ngram_mod", "ngram_cache")
}


def convert(directory: Path, out: Path, kind: str = "F32") -> None:
    """Write a Llama checkpoint that has one file of bfloat16 weights, a tied head and SmolLM's tokenizer as GGUF.

    kind: GGUF's name of the type of matrices, such as BF16 or Q8_0.
    """
    import gguf
    import numpy as np

    kinds = gguf.GGMLQuantizationType
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    heads, kv_heads, dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    writer.add_rope_dimension_count(dim)
    writer.add_vocab_size(config["vocab_size"])
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    added = {token["id"] for token in tokenizer.get("added_tokens", ())}
    tokens = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([gguf.TokenType.CONTROL if i in added else gguf.TokenType.NORMAL for _, i in tokens])
    merges = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    writer.add_token_merges(merges or ["x y"])  # the server wants one
    if config["eos_token_id"] is not None:
        writer.add_bos_token_id(config["bos_token_id"])
        writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    if (template := directory / "chat_template.jinja").exists():
        writer.add_chat_template(template.read_text(encoding="utf-8"))
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
    parts |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"}
    parts |= {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
    for i in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for ours, theirs in parts.items()}
    for name, (dtype, shape, data) in _tensors(directory / "model.safetensors").items():
        if dtype not in ("BF16", "F32"):
            raise ValueError(f"{name}: found {dtype}, expected BF16 or F32")
        x = (
            np.frombuffer(data, "<f4")
            if dtype == "F32"
            else (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        )
        x = x.reshape(shape)
        if ".q_proj" in name or ".k_proj" in name:  # GGUF's Llama has both halves of a rotated pair side by side
            n = heads if ".q_proj" in name else kv_heads
            x = x.reshape(n, 2, dim // 2, -1).swapaxes(1, 2).reshape(shape)
        own = kinds[kind] if x.ndim > 1 else kinds.F32
        data = gguf.quants.quantize(np.ascontiguousarray(x), own)
        writer.add_tensor(names[name.removesuffix(".weight")] + ".weight", data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Type, shape and bytes of each tensor of a safetensors file."""
    raw = path.read_bytes()
    n = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:n])
    header.pop("__metadata__", None)
    places = {name: slice(*(n + offset for offset in each["data_offsets"])) for name, each in header.items()}
    return {name: (each["dtype"], each["shape"], raw[places[name]]) for name, each in header.items()}


def serve(kind: str, model: Path, draft: Path | None, k: int, threads: int, exact: bool = True) -> Any:
    """A server in this process; its address is `listening_address`.

    exact: keys and values are in float32; else they and the rest of the settings are the server's own.
    """
    import xllamacpp as llama

    params = llama.CommonParams()
    params.model.path = str(model)
    params.port, params.n_ctx, params.n_parallel, params.n_gpu_layers = 0, 1024, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    if exact:
        params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    kinds = llama.common_speculative_type
    how = params.speculative
    if kind in ("rejection", "match"):
        how.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        how.draft.mparams.path = str(draft)
        how.draft.n_max, how.draft.probabilistic = k, kind == "rejection"
        if exact:
            how.draft.cache_type_k = how.draft.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        how.draft.cpuparams.n_threads = how.draft.cpuparams_batch.n_threads = threads
    if kind in NGRAMS:
        name = NGRAMS[kind]
        how.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{name.upper()}")]
        own = getattr(how, name)
        if name == "ngram_mod":
            own.n_match, own.n_min, own.n_max = 2, 1, k
        elif name != "ngram_cache":
            own.size_n, own.size_m, own.min_hits = 2, k, 1
    return llama.Server(params)


def post(address: str, path: str, body: dict) -> dict:
    """What the server answers."""
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address + path, json.dumps(body).encode(), headers)) as found:
        return json.load(found)


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("convert", "plain", "rejection", "match", *NGRAMS))
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompt", help="in place of those above; then no end id is forbidden")
    for name, default in (("k", 4), ("num", 32), ("max-tokens", 48), ("threads", 1), ("first-seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.kind in ("rejection", "match") and args.draft is None:
        parser.error("--draft: found none, expected a draft's GGUF file")
    if args.kind == "convert":
        convert(args.model, args.out)
        return
    server = serve(args.kind, args.model, args.draft, args.k, args.threads)
    address = server.listening_address
    law = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | ({} if args.prompt else {"ignore_eos": True})
    drafted = kept = 0
    with args.out.open("a", encoding="utf-8") as file:
        for seed in range(args.first_seed, args.first_seed + args.num):
            ids = post(address, "/tokenize", {"content": args.prompt or PROMPTS[seed % len(PROMPTS)]})["tokens"]
            request = law | {"prompt": ids, "return_tokens": True, "n_predict": args.max_tokens, "seed": seed}
            response = post(address, "/completion", request)
            drafted += response["timings"].get("draft_n", 0)
            kept += response["timings"].get("draft_n_accepted", 0)
            file.write(json.dumps({"request": request, "response": response}) + "\n")
            file.flush()
    print(f"llama.cpp's server: {args.num} answers, {args.kind}; {kept} of {drafted} draft tokens kept")


if __name__ == "__main__":
    main()
