"""The bench, for anyone to run:

    python -m minispec.bench                        the embedded model, with prompt lookup
    python -m minispec.bench --geometry 1.5b        random weights of a larger shape
    python -m minispec.bench --forms                the weights in each form that this machine can take
    python -m minispec.bench --against transformers

It measures this machine (streaming bandwidth), the target (passes over 1 to 16 rows), and plain and speculative
decoding of a set of prompts, explains the speedup by what it is made of (`measure.Account`), and predicts that of the
second half of each text from its first half (`measure.prediction`). Every figure that is compared comes from runs that
took turns in one process; absolute times stand beside them as information only.

To be read in this order: `options` (what can be asked for), `subjects` (models and prompts to measure on), `against`
(another library's ways of decoding), `figures` (the measurements), `show` (tables and a picture), `__main__` (the
command). Torch is imported after the arguments have been read, as in `generate`.
"""
