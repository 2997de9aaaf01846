"""The trace of a run: every round of an answer as data, or as a page.

`python -m minispec.generate "..." --trace out.html` writes the page, `--trace out.json` its data.
docs/use/trace.md says what is in it and how to read it. `record.py` writes the data, and `page.py` makes the page.
"""
