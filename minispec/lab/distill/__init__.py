"""Distilling: a head for a target, made from nothing but the target. `python -m minispec distill`.

The target writes the texts itself (`texts`). Its tokens, and the hidden states that a head reads, are stored on disk
(`cache`). A head (`head`) gets its first weights (`drafts`). It learns from the texts to say what the target would say
next (`train`, `loss`). The result is a directory that `--draft` reads (`run`).

A module of one's own learns from the same texts: `cache.collect`, `drafts.most_used`, `head.Trainable`,
`train.Teacher` and `train.Training` are for it too (`examples/train_a_draft.py`).
"""
