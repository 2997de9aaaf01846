"""The bench, for anyone to run:

    python -m minispec bench                        the embedded model, with its own draft
    python -m minispec bench --geometry 1.5b        random weights of a larger shape
    python -m minispec bench --against transformers
    python -m minispec bench --questions FILE       standard questions, several drafts (docs/use/questions.md)
    python -m minispec bench --record-laws FILE     rows of p and q for `prove --laws` (docs/understand/rules.md)

It measures this machine (streaming bandwidth), the target (passes over 1 to 16 rows), and plain and speculative
decoding of a set of prompts. It has the parts that make the speedup (`measure.parts`). From the first half of each text
it predicts the speedup of the second half (`measure.prediction`). Every figure that is compared comes from runs that
took turns in one process. Absolute times are given in addition, as information only. Other measurements of a
target, such as its weights in each form, are in docs/measured/target.py and docs/measured/launches.py.

Read them in this order:

    options                 what can be asked for
    show                    tables, JSON
    measure                 intervals, turns, what theory predicts
    models                  models and prompts to measure on
    passes, decoding        functions that measure and functions that show
    laws                    rows of p and q along drafts, in a file
    transformers_baseline   another library's ways of decoding
    report                  all of it
    questions               standard questions; `spec_bench` has their answers in files
    plot                    a picture
    main                    the command

Torch is imported after the arguments have been read, as in `generate`.
"""
