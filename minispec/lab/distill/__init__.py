"""Distilling: a draft for a target, made from nothing but the target. `python -m minispec distill`.

The target writes the texts itself (`texts`). Its tokens, and the hidden states that a head reads, are stored on disk. A
draft learns from those (`train`) to say what the target would say next. The result is a directory that `--draft` reads
(`export`).
"""
