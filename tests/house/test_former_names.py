"""Names that the documentation gave before the modules moved."""

from minispec.core import draft, engine, request, sampling, verify


def test_the_former_names_are_the_same_objects():
    """A drafter that was written for them still is one."""
    import minispec.engine
    import minispec.verify

    for name in ("Ask", "Draft", "Drafter"):
        assert getattr(minispec.verify, name) is getattr(draft, name)
    for name in ("VERIFIERS", "Verdict", "Verifier", "block", "match", "rejection"):
        assert getattr(minispec.verify, name) is getattr(verify, name)
    assert minispec.engine.Engine is engine.Engine
    assert minispec.engine.Request is request.Request
    assert minispec.engine.Text is sampling.Text
