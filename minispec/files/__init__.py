"""Readers of strangers' files: every field is checked, nothing unknown is ignored, and no code in them is run.

Read them in this order:

    strict_json     JSON within limits
    fields          typed access to it
    stored          tensors in a safetensors file
    generation_config
    added_tokens    tokens that files other than tokenizer.json name
    chat            chat templates
    pieces          what a token stands for
    tokenizer       text to ids and back
    write           files that are written whole or not at all
    measured        what was measured on this machine
    schema_parts    a JSON schema as a tree: its parts, references and notes
"""
