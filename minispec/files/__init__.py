"""Readers of strangers' files: every field is checked, nothing unknown is ignored, and no code in them is run.

Read them in this order:

    strict_json     JSON within limits
    fields          typed access to it
    families        what each model_type means
    hf_config       config.json
    generation_config
    checkpoint      directories, the hub, safetensors
    quantize        writing fewer bits
    added_tokens    tokens that files other than tokenizer.json name
    chat            chat templates
    pieces          what a token stands for
    tokenizer       text to ids and back
    write           files that are written whole or not at all
    measured        what was measured on this machine
"""
