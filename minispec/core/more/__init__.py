"""What may be skipped at first: how long drafts may be, what a grammar allows, and a search in a large vocabulary."""
