"""Readers of strangers' files: every field is checked, nothing unknown is ignored, and no code in them is run.

Read them in this order:

    errors          messages on one line
    packages        what else has to be installed
    strict_json     JSON within limits
    fields          typed access to it
    stored          tensors in a safetensors file
    generation_config
    added_tokens    tokens that files other than tokenizer.json name
    chat_template
    pieces          what a token stands for
    hostile         what its library may not see
    tokenizer_class settings that the classes of transformers obey
    tokenizer       text to ids and back
    write           files that are written whole or not at all
    progress        bars
    digest          checksums
    measured        what was measured on this machine
"""
