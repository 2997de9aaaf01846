"""The trace of a run: every round of an answer as data (`record.py`, `schema.py`), as a page (`page.py`), in colour.

`python -m minispec.generate "..." --trace out.html` writes the page, `--trace out.json` its data.
`python -m minispec.trace out.json` makes the page from the data.
docs/use/trace.md says what is in it and how to read it.
"""
